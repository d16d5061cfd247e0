//! Runs whose model is rate limited: they wait, pause until a time and resume on any node, or fail.

use crate::on_every_store;
use crate::support::*;
use async_trait::async_trait;
use jiff::SignedDuration;
use std::sync::atomic::{AtomicUsize, Ordering};
use tenure::{run::*, session::*, *};

/// A model that refuses its first requests, then answers `done`.
struct LimitedModel {
    refusals: usize,
    status: u16,
    retry_after: Option<&'static str>,
    requests: AtomicUsize,
}

impl LimitedModel {
    fn new(refusals: usize, status: u16, retry_after: Option<&'static str>) -> Self {
        Self { refusals, status, retry_after, requests: AtomicUsize::new(0) }
    }
}

#[async_trait]
impl Model for LimitedModel {
    async fn ask(&self, _: Prompt) -> Result<ModelStream, ModelError> {
        if self.requests.fetch_add(1, Ordering::SeqCst) >= self.refusals {
            return Ok(model_answer(Message::assistant("done")));
        }
        let retry_after = self.retry_after.map(str::to_owned);
        Err(ModelError::Refused { status: self.status, content_type: String::new(), body: String::new(), retry_after })
    }
}

/// Begins a turn of the clerk in session `x` and executes it, pausing at rate limits.
async fn run(tenure: &Tenure, model: &LimitedModel, ask: TurnRequest) -> Result<TurnOutcome, TurnError> {
    let turn = begin(tenure, ask).await?;
    turn.execute(Executors::new(model).on_rate_limit(OnRateLimit::Pause)).await
}

/// Takes over the released run.
async fn resume(tenure: &Tenure, model: &LimitedModel) -> Vec<Result<TurnOutcome, TurnError>> {
    let mut done = Vec::new();
    for head in tenure.find_orphaned_runs(16).await.unwrap() {
        let turn = tenure.claim_orphaned_run(&head).await.unwrap().unwrap();
        done.push(turn.execute(Executors::new(model).on_rate_limit(OnRateLimit::Pause)).await);
    }
    done
}

on_every_store! {
    /// Beyond `retry_wait`, the session is paused with a reason until the time that the server named. Then the
    /// run resumes, on any node, and nothing is lost.
    async fn a_run_pauses_until_the_limit_is_over(test: &mut TestTenure) {
        test.tenure.declare(clerk(|_| ()));
        for status in [429, 503] {
            let model = LimitedModel::new(1, status, Some("60"));
            let outcome = run(&test.tenure, &model, question("hi")).await.unwrap();
            assert!(outcome.waiting);
            let session = session_x(&test.tenure).await;
            let head = session.head();
            let pause = head.pause.clone().unwrap();
            let until = test.now().checked_add(SignedDuration::from_secs(60)).unwrap();
            assert_eq!((head.status, pause.until, head.due_at), (Status::Paused, Some(until), Some(until)));
            assert_eq!(pause.reason.unwrap(), format!("rate limited: the model server responded with status {status}"));
            assert_eq!((head.run.as_ref(), &head.lease), (Some(&outcome.run), &None));
            assert_eq!(conversation(&session).last().unwrap(), "user: hi", "the message is stored");
            assert!(session.notice().unwrap().contains(&format!("run {})", outcome.run)));
            let error = begin(&test.tenure, question("more")).await.unwrap_err();
            assert_eq!(error.code(), "paused");

            test.advance(SignedDuration::from_secs(59));
            assert_eq!(test.tenure.resume_paused().await.unwrap(), 0, "not before its time");
            test.reopen().await;
            test.tenure.declare(clerk(|_| ()));
            test.advance(SignedDuration::from_secs(1));
            assert_eq!(test.tenure.resume_paused().await.unwrap(), 1);
            assert_eq!(test.tenure.resume_paused().await.unwrap(), 0, "once");
            let resumed = resume(&test.tenure, &model).await;
            assert_eq!(resumed.len(), 1);
            assert_eq!(resumed[0].as_ref().unwrap().run, outcome.run);
            let session = session_x(&test.tenure).await;
            assert_eq!(conversation(&session)[conversation(&session).len() - 2..], ["user: hi", "assistant: done"]);
            assert_eq!((session.head().status, &session.head().pause), (Status::Active, &None));
            assert_eq!(session.notice(), None);
        }
    }

    /// The sweep also continues a session whose pause is over.
    async fn the_sweep_continues_a_paused_session(test: &mut TestTenure) {
        test.tenure.declare(clerk(|_| ()));
        let model = LimitedModel::new(1, 429, Some("60"));
        run(&test.tenure, &model, question("hi")).await.unwrap();
        test.advance(SignedDuration::from_secs(61));
        assert_eq!(test.tenure.sweep().await.unwrap().resumed.len(), 1);
        assert!(resume(&test.tenure, &model).await.pop().unwrap().is_ok());
    }

    /// A paused run can be cancelled, and resumed early by activating its session.
    async fn a_paused_run_is_cancelled_or_activated(test: &mut TestTenure) {
        test.tenure.declare(clerk(|_| ()));
        let model = LimitedModel::new(1, 429, Some("60"));
        let outcome = run(&test.tenure, &model, question("one")).await.unwrap();
        test.tenure.cancel(&ada(), &id("x"), &outcome.run).await.unwrap();
        assert_eq!(session_x(&test.tenure).await.head().status, Status::Active);
        assert_eq!(ending(&session_x(&test.tenure).await).0, Some(RunOutcome::Cancelled));
        test.advance(SignedDuration::from_secs(61));
        assert_eq!(test.tenure.resume_paused().await.unwrap(), 0);

        let model = LimitedModel::new(1, 429, Some("60"));
        run(&test.tenure, &model, question("two")).await.unwrap();
        test.tenure.activate(&ada(), &id("x")).await.unwrap();
        assert!(resume(&test.tenure, &model).await.pop().unwrap().is_ok());
        assert_eq!(conversation(&session_x(&test.tenure).await).last().unwrap(), "assistant: done");
    }
}

/// Within `retry_wait` the run waits in place, without a pause.
#[tokio::test(flavor = "multi_thread")]
async fn a_short_limit_is_waited_for() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    test.tenure.declare(clerk(|_| ()));
    for (n, retry_after) in [Some("0"), Some("0.2"), None].into_iter().enumerate() {
        let model = LimitedModel::new(2, 429, retry_after);
        let outcome = run(&test.tenure, &model, question(&format!("q{n}"))).await.unwrap();
        assert_eq!((outcome.waiting, model.requests.load(Ordering::SeqCst)), (false, 3));
    }
    assert!(session_x(&test.tenure).await.checkpoints.iter().all(|c| !c.label.as_str().contains('.')), "no pause");
}

/// A run that may not pause fails with the error of the model, and its message is stored: if the caller says so, if
/// the run is not resumable, and if pauses are switched off.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_may_not_pause_fails() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    for (n, max_pause) in [(0, None), (1, None), (2, Some("0s"))] {
        test.tenure.declare(clerk(|c| c.runs.max_pause = max_pause.map(|p| p.parse().unwrap())));
        let model = LimitedModel::new(9, 429, Some("60"));
        let mut ask = question(&format!("q{n}"));
        if n == 1 {
            ask.resumable = None;
        }
        let policy = if n == 0 { OnRateLimit::Fail } else { OnRateLimit::Pause };
        let turn = begin(&test.tenure, ask).await.unwrap();
        let error = turn.execute(Executors::new(&model).on_rate_limit(policy)).await.unwrap_err();
        assert_eq!((error.code(), model.requests.load(Ordering::SeqCst)), ("upstream_refused", 1));
        let session = session_x(&test.tenure).await;
        assert_eq!(ending(&session), (Some(RunOutcome::Failed), Some("upstream_refused".to_owned())));
        assert_eq!((session.head().status, session.messages.len()), (Status::Active, n + 1));
    }
}

/// Without `Retry-After`, pauses get longer; a server that never admits the run makes it fail in the end. The time
/// of the pauses does not count against `max_time`, and no pause exceeds `max_pause`.
#[tokio::test(flavor = "multi_thread")]
async fn pauses_get_longer_and_end() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    test.tenure.declare(clerk(|c| {
        c.runs.retry_wait = Some("0s".parse().unwrap());
        c.runs.max_time = Some("1m".parse().unwrap());
    }));
    let model = LimitedModel::new(99, 429, None);
    run(&test.tenure, &model, question("hi")).await.unwrap();
    let mut last = SignedDuration::ZERO;
    for n in 1.. {
        let until = session_x(&test.tenure).await.head().paused_until().unwrap();
        let pause = until.duration_since(test.now());
        assert!(pause > last || pause == SignedDuration::from_hours(1), "{n}: {pause:?} after {last:?}");
        assert!(pause <= SignedDuration::from_hours(1));
        last = pause;
        test.advance(pause);
        assert_eq!(test.tenure.resume_paused().await.unwrap(), 1);
        match resume(&test.tenure, &model).await.pop().unwrap() {
            Ok(outcome) => assert!(outcome.waiting),
            Err(e) => {
                assert_eq!((e.code(), n), ("upstream_refused", 10));
                break;
            }
        }
    }
    assert_eq!(session_x(&test.tenure).await.head().status, Status::Active);
}

/// A client that sends back everything also sends the notice of a pause. It is not stored, and it is not taken for an
/// edit: the answer of the run stands for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_notice_that_is_sent_back_is_not_stored() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    test.tenure.declare(clerk(|_| ()));
    let model = LimitedModel::new(1, 429, Some("60"));
    run(&test.tenure, &model, question("hi")).await.unwrap();
    let notice = session_x(&test.tenure).await.notice().unwrap();
    test.advance(SignedDuration::from_secs(60));
    test.tenure.resume_paused().await.unwrap();
    resume(&test.tenure, &model).await;
    let messages = vec![Message::user("hi"), Message::assistant(&notice), Message::user("and now?")];
    // Without a session id: the notice names its session.
    let ask = TurnRequest { session: None, messages, history: None, content_matching: true, ..question("") };
    let outcome = run(&test.tenure, &model, ask).await.unwrap();
    assert_eq!(outcome.session_id, id("x"));
    let want = ["user: hi", "assistant: done", "user: and now?", "assistant: done"];
    assert_eq!(conversation(&session_x(&test.tenure).await), want);
}
