//! A turn: find the session, make the client's view and ours one, ask the model, keep what it says.
//!
//! What the user said is durable before the model is asked; the answer is durable before the turn is called done. A turn that fails
//! or is stopped keeps what it has and says so (`run_ended`).

use crate::answer::Answer;
use crate::busy::{Entered, OnBusy, Pass};
use crate::entry::{Change, Created, Entry, InfoChange, Outcome, Post, Record};
use crate::error::{Error, Result};
use crate::fields::Fields;
use crate::head::Head;
use crate::history::shown;
use crate::hot::{Draft, Need};
use crate::id::{Key, Principal, RunId, Seq, SessionId};
use crate::message::Message;
use crate::model::{Model, ModelError, Piece, Prompt};
use crate::reconcile::{Mode, Plan, reconcile};
use crate::session::{Point, Said, Session};
use crate::store::{Item, Owner, Shelf};
use crate::tenure::Tenure;
use jiff::SignedDuration;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tokio::sync::mpsc;

/// What a request under the id of an expired session does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnExpired {
    /// It goes on with it.
    #[default]
    Restore,
    /// The old one is purged, and a new one begins.
    Fresh,
    /// It is refused.
    Reject,
}

/// A request for a turn.
#[derive(Clone, Debug, Default)]
pub struct Ask {
    /// The session; if none is named, it is found by content, or begun.
    pub session: Option<SessionId>,
    /// What the client sends.
    pub messages: Vec<Message>,
    /// How to read it.
    pub mode: Mode,
    /// The assistant that a new session belongs to.
    pub assistant: Option<String>,
    /// The model's name, for the session's card.
    pub model: Option<String>,
    /// Whether to look for the session by content.
    pub content_matching: bool,
    /// What to do if the session is busy.
    pub on_busy: OnBusy,
    /// What to do if it has expired.
    pub on_expired: OnExpired,
    /// The same key with the same body is answered once, and the same each time.
    pub idempotency: Option<(String, String)>,
}

/// What was made of the messages of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spliced {
    /// How many of them we had.
    pub matched: usize,
    /// How many messages of tool turns stay although the client did not send them.
    pub spliced: usize,
    /// How many stored messages were cut off.
    pub rewound: usize,
    /// How many of them are new.
    pub appended: usize,
    /// Tool results that answer no call we know of, which were left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub orphans: Vec<String>,
}

/// What became of a request.
#[derive(Debug)]
pub enum Begun {
    /// A turn that can be run.
    Turn(Box<Turn>),
    /// It was done before, with this answer (a `chat.completion`).
    Before {
        /// The session.
        session_id: SessionId,
        /// The run that answered.
        run: RunId,
        /// The answer.
        body: String,
    },
}

/// A turn that has begun: what the user said is kept, and the session is ours until it is done or dropped.
#[derive(Debug)]
pub struct Turn {
    tenure: Tenure,
    who: Principal,
    pass: Pass,
    remember: bool,
    /// The message that is answered; 0: there is none.
    asked: Seq,
    /// The session.
    pub session_id: SessionId,
    /// The id of this turn's run.
    pub run: RunId,
    /// What was made of the request's messages.
    pub spliced: Spliced,
    /// What the model is to be shown.
    pub messages: Vec<Message>,
}

/// An answer that is kept.
#[derive(Clone, Debug)]
pub struct Answered {
    /// The answer.
    pub answer: Answer,
    /// The end of the log after it.
    pub seq: Seq,
    /// Whether whoever listened took every piece of it; one that takes nothing for too long (`max_stall`) gets no more.
    pub heard: bool,
}

/// Why a turn has no answer.
#[derive(Debug, thiserror::Error)]
pub enum TurnError {
    /// It could not be kept.
    #[error(transparent)]
    Store(#[from] Error),
    /// The model gave none.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Another request stopped the turn.
    #[error("another request interrupted this turn; what was said until then is kept")]
    Stopped,
}

const KEYS: &str = "turn-keys";
const ANSWERS: &str = "turn-answers";
/// How long an idempotency key is remembered.
const KEY_TTL: SignedDuration = SignedDuration::from_hours(24);

/// An idempotency key that was used.
#[derive(Serialize, Deserialize)]
struct Claim {
    body: String,
    session: SessionId,
    run: RunId,
}

impl Tenure {
    /// Begins a turn: finds the session, waits until it is free, and keeps what the client says.
    pub async fn turn(&self, who: &Principal, ask: Ask) -> Result<Begun> {
        let (incoming, blobs) = self.detach(&ask.messages)?;
        // The same key at the same time: the second one waits until it is known what the first one is.
        let _claiming = match &ask.idempotency {
            Some((key, _)) => {
                Some(self.key_gates().enter(&place(who, key)?, OnBusy::Queue, self.limits().max_queue).await?)
            }
            None => None,
        };
        let claim = self.claimed(who, &ask).await?;
        // A repeated request waits for its own first try, and never stops it or steps aside.
        let on_busy = if claim.is_some() { OnBusy::Queue } else { ask.on_busy };
        let mut id = match (&claim, &ask.session) {
            (Some(claim), _) => claim.session.clone(),
            (None, Some(id)) => id.clone(),
            (None, None) if ask.content_matching => {
                self.find(who, &incoming).await?.unwrap_or_else(SessionId::generate)
            }
            (None, None) => SessionId::generate(),
        };
        let run = claim.as_ref().map_or_else(RunId::generate, |c| c.run.clone());
        for _ in 0..=self.limits().max_retries {
            let key = who.key(&id);
            let pass = match self.gates().enter(&key, on_busy, self.limits().max_queue).await? {
                Entered::Pass(pass) => pass,
                Entered::Branch(before) => {
                    id = self.fork(who, &id, Point::Position(before), None).await?.info.session_id;
                    continue;
                }
            };
            if let Some(claim) = &claim
                && let Some(body) = self.answer_of(who, claim).await?
            {
                return Ok(Begun::Before { session_id: id, run, body });
            }
            let opening = Opening { ask: &ask, incoming: &incoming, run: &run, resuming: claim.is_some() };
            if let (Some((key, body)), None) = (&ask.idempotency, &claim) {
                self.remember_key(who, key, Claim { body: body.clone(), session: id.clone(), run: run.clone() })
                    .await?;
            }
            let opened = match self.open_turn(who, &id, &opening, &blobs).await {
                Err(Error::NotFound { .. }) => self.open_fresh(who, &id, &opening, &blobs).await,
                other => other,
            };
            let opened = match opened {
                Ok(opened) => opened,
                Err(Error::Gone { status, session_id }) => {
                    self.reopen(who, &session_id, status, ask.on_expired).await?;
                    continue;
                }
                // Made by somebody else just now, or somebody else's: the next look tells.
                Err(Error::Exists { session_id }) => {
                    self.head(who, &session_id).await?;
                    continue;
                }
                Err(e) => return Err(e),
            };
            pass.began(opened.before);
            let mut messages = self.instructions(who, opened.assistant.or_else(|| ask.assistant.clone())).await?;
            messages.reserve(opened.messages.len());
            for message in opened.messages {
                messages.push(match message.cuts().is_empty() {
                    true => message,
                    false => self.attach_message(&who.tenant, &message).await?,
                });
            }
            let (tenure, who, remember) = (self.clone(), who.clone(), ask.idempotency.is_some());
            let (asked, spliced) = (opened.asked, opened.spliced);
            let turn = Turn { tenure, who, pass, remember, asked, session_id: id, run, spliced, messages };
            return Ok(Begun::Turn(Box::new(turn)));
        }
        Err(Error::Conflict { session_id: id, expected: 0 })
    }

    /// What a model would be shown if this were said. Nothing is kept.
    pub async fn preview(&self, who: &Principal, ask: &Ask) -> Result<Vec<Message>> {
        self.detach(&ask.messages)?; // for its limits
        let session = match &ask.session {
            Some(id) => match self.load(who, id).await {
                Ok(session) => Some(session),
                Err(Error::NotFound { .. } | Error::Gone { .. }) => None,
                Err(e) => return Err(e),
            },
            None => None,
        };
        let assistant = session.as_ref().and_then(|s| s.assistant.clone()).or_else(|| ask.assistant.clone());
        let mut messages = self.instructions(who, assistant).await?;
        let Some(session) = session else {
            messages.extend(ask.messages.iter().cloned());
            return Ok(messages);
        };
        let plan = reconcile(&session, &ask.messages, ask.mode);
        let window = self.policy(&who.tenant, session.assistant.as_deref()).window;
        let new = said(&plan, session.seq);
        messages.extend(shown(&after(&session, &plan, &new), session.summary.as_ref(), &window));
        Ok(messages)
    }

    /// What a model is told before anything else.
    async fn instructions(&self, who: &Principal, assistant: Option<String>) -> Result<Vec<Message>> {
        let Some(name) = assistant else { return Ok(Vec::new()) };
        let assistant = self.assistant(who, &name).await?;
        Ok(assistant.and_then(|a| a.instructions.as_deref().map(Message::system)).into_iter().collect())
    }

    /// Brings a session that has ended back, or makes room for a new one under its id.
    async fn reopen(&self, who: &Principal, id: &SessionId, status: &'static str, rule: OnExpired) -> Result<()> {
        match (status, rule) {
            ("deleted", _) | (_, OnExpired::Fresh) => self.purge(who, id).await.map(drop),
            (_, OnExpired::Restore) => self.restore(who, id).await.map(drop),
            (_, OnExpired::Reject) => Err(Error::Gone { session_id: id.clone(), status }),
        }
    }

    async fn open_turn(
        &self,
        who: &Principal,
        id: &SessionId,
        opening: &Opening<'_>,
        blobs: &[crate::media::Blob],
    ) -> Result<Opened> {
        self.write(who, id, Need::Session, |state, _| {
            let session = self.whole_ref(state, id)?;
            self.check_active(session)?;
            let plan = opening.plan(session);
            let mut entries = Vec::new();
            let mut cut = Vec::new();
            if plan.rewound > 0 {
                let (entry, messages) = crate::checkpoint::rewound(session, plan.keep);
                entries.push(entry);
                cut = messages;
            }
            entries.extend(plan.append.iter().cloned().map(Entry::Message));
            let asked = match plan.append.is_empty() {
                true => session.messages[..plan.keep].last().map_or(0, |m| m.seq),
                false => session.seq + entries.len() as Seq,
            };
            let change = opening.change(session, &plan);
            entries.extend((change != InfoChange::default()).then(|| Entry::info(change)));
            entries.push(opening.started());
            let opened = self.opened(session, &plan, asked);
            let mut draft = Draft::new(entries, opened);
            let used: Vec<_> = plan.append.iter().flat_map(|p| p.message.cuts()).map(|c| c.id).collect();
            draft.blobs = blobs.iter().filter(|b| used.contains(&b.id)).cloned().collect();
            draft.cut = cut;
            Ok(draft)
        })
        .await
    }

    /// The first turn of a session: one commit with all of it.
    async fn open_fresh(
        &self,
        who: &Principal,
        id: &SessionId,
        opening: &Opening<'_>,
        blobs: &[crate::media::Blob],
    ) -> Result<Opened> {
        let (key, now) = (who.key(id), self.now());
        let mut created = Created { user: who.user.clone(), ..Created::default() };
        (created.assistant, created.model) = (opening.ask.assistant.clone(), opening.ask.model.clone());
        self.check_info(&created)?;
        let mut first = Record { seq: 1, at: now, entry: Entry::created(created.clone()) };
        let Some(head) = Head::begin(&key, &first) else { return Err(Error::invalid("session", "not a session")) };
        let empty = Session::empty(head);
        let plan = opening.plan(&empty);
        created.style = plan.style;
        first.entry = Entry::created(created);
        let asked = if plan.append.is_empty() { 0 } else { 1 + plan.append.len() as Seq };
        let posts = plan.append.iter().cloned().map(Entry::Message);
        let more = (2..).zip(posts.chain([opening.started()])).map(|(seq, entry)| Record { seq, at: now, entry });
        self.begin_with(&key, &first, more.collect(), blobs.to_vec()).await?;
        Ok(self.opened(&empty, &plan, asked))
    }

    fn opened(&self, session: &Session, plan: &Plan, asked: Seq) -> Opened {
        let window = self.policy(&session.tenant, session.assistant.as_deref()).window;
        let new = said(plan, session.seq);
        Opened {
            before: plan.keep.min(session.messages.len()),
            asked,
            assistant: session.assistant.clone(),
            messages: shown(&after(session, plan, &new), session.summary.as_ref(), &window),
            spliced: Spliced {
                matched: plan.matched,
                spliced: plan.spliced,
                rewound: plan.rewound,
                appended: plan.append.len(),
                orphans: plan.orphans.clone(),
            },
        }
    }

    async fn claimed(&self, who: &Principal, ask: &Ask) -> Result<Option<Claim>> {
        let Some((key, body)) = &ask.idempotency else { return Ok(None) };
        let Some(item) = self.store().get(&keys(who), key, None).await? else { return Ok(None) };
        if item.expires_at.is_some_and(|t| t < self.now()) {
            return Ok(None);
        }
        let claim: Claim =
            serde_json::from_str(&item.value).map_err(|e| Error::corrupt(format!("idempotency key {key:?}"), e))?;
        match claim.body == *body {
            true => Ok(Some(claim)),
            false => Err(Error::KeyReused { key: key.clone() }),
        }
    }

    async fn remember_key(&self, who: &Principal, key: &str, claim: Claim) -> Result<()> {
        let value = serde_json::to_string(&claim).expect("plain data");
        self.store().put(&keys(who), &self.item(key, value), None).await
    }

    async fn answer_of(&self, who: &Principal, claim: &Claim) -> Result<Option<String>> {
        let shelf = Shelf {
            tenant: who.tenant.clone(),
            owner: Owner::Session(claim.session.clone()),
            name: ANSWERS.to_owned(),
        };
        Ok(self.store().get(&shelf, claim.run.as_str(), None).await?.map(|i| i.value))
    }

    fn item(&self, key: &str, value: String) -> Item {
        let now = self.now();
        let expires_at = now.checked_add(KEY_TTL).ok();
        Item { key: key.to_owned(), value, text: None, created_at: now, used_at: now, uses: 0, expires_at }
    }
}

/// Where those meet who have the same key.
fn place(who: &Principal, key: &str) -> Result<Key> {
    let hash = blake3::hash(format!("{}\0{key}", who.user).as_bytes());
    Ok(who.key(&SessionId::new(hash.to_hex().as_str())?))
}

fn keys(who: &Principal) -> Shelf {
    Shelf { tenant: who.tenant.clone(), owner: Owner::User(who.user.clone()), name: KEYS.to_owned() }
}

/// What a turn begins with.
struct Opening<'a> {
    ask: &'a Ask,
    incoming: &'a [Message],
    run: &'a RunId,
    /// The same request came before, and may have got as far as keeping what was said.
    resuming: bool,
}

/// A turn whose beginning is kept.
struct Opened {
    before: usize,
    asked: Seq,
    assistant: Option<String>,
    messages: Vec<Message>,
    spliced: Spliced,
}

impl Opening<'_> {
    fn plan(&self, session: &Session) -> Plan {
        let mut plan = reconcile(session, self.incoming, self.ask.mode);
        if self.resuming && session.runs.last().is_some_and(|r| r.id == *self.run) {
            // What it said is there, and nobody has said anything since. What was answered before it broke off is no answer.
            let (stored, matched) = (&session.messages, self.incoming.len());
            let keep = stored.iter().rposition(|m| m.run.as_ref() != Some(self.run)).map_or(0, |i| i + 1);
            plan = Plan { keep, append: Vec::new(), rewound: stored.len() - keep, matched, ..plan };
        }
        plan
    }

    fn started(&self) -> Entry {
        Entry::RunStarted { run: self.run.clone(), detail: Default::default() }
    }

    fn change(&self, session: &Session, plan: &Plan) -> InfoChange {
        let mut change = InfoChange::default();
        if plan.style != session.style {
            change.style = Change::Set(plan.style);
        }
        if let Some(model) = self.ask.model.as_ref().filter(|m| Some(*m) != session.info.model.as_ref()) {
            change.model = Change::Set(model.clone());
        }
        change
    }
}

/// The new messages as they will stand in the session.
fn said(plan: &Plan, seq: Seq) -> Vec<Said> {
    let new = (seq + 1..).zip(&plan.append);
    new.map(|(seq, Post { run, lead, message })| Said {
        seq,
        at: jiff::Timestamp::UNIX_EPOCH,
        run: run.clone(),
        lead: *lead,
        message: message.clone(),
    })
    .collect()
}

fn after<'a>(session: &'a Session, plan: &Plan, new: &'a [Said]) -> Vec<&'a Said> {
    session.messages[..plan.keep].iter().chain(new).collect()
}

impl Turn {
    /// Asks the model and keeps its answer. The pieces are handed on as they arrive; whoever listens may go away, the turn goes on.
    pub async fn run(
        mut self,
        model: &dyn Model,
        options: Fields,
        stream: bool,
        mut listener: Option<mpsc::Sender<Piece>>,
    ) -> Result<Answered, TurnError> {
        let (mut answer, listened) = (Answer::default(), listener.is_some());
        let stall = self.tenure.limits().max_stall;
        let prompt = Prompt { messages: std::mem::take(&mut self.messages), options, stream };
        let heard = tokio::select! {
            heard = listen(model, prompt, &mut answer, &mut listener, stall) => heard,
            () = self.pass.stopped() => Err(TurnError::Stopped),
        };
        match heard {
            Ok(()) => self.complete(answer, listened == listener.is_some()).await,
            Err(why) => {
                let outcome = if matches!(why, TurnError::Stopped) { Outcome::Cancelled } else { Outcome::Failed };
                self.give_up(&answer, outcome, &why.to_string()).await?;
                Err(why)
            }
        }
    }

    async fn complete(self, answer: Answer, heard: bool) -> Result<Answered, TurnError> {
        let Some(message) = answer.message() else {
            let why = ModelError::Broken { why: "it ended before anything was said".into() };
            self.give_up(&answer, Outcome::Failed, &why.to_string()).await?;
            return Err(why.into());
        };
        let item = self.remember.then(|| {
            let body = answer.body(self.run.as_str(), self.tenure.now());
            (ANSWERS.to_owned(), self.tenure.item(self.run.as_str(), body))
        });
        let seq = self.end(vec![message], Outcome::Completed, None, item).await?;
        Ok(Answered { answer, seq, heard })
    }

    /// Ends the turn without a whole answer, and keeps what there is of one.
    async fn give_up(&self, answer: &Answer, outcome: Outcome, why: &str) -> Result<()> {
        let said = answer.message().into_iter().collect();
        match self.end(said, outcome, Some(why.to_owned()), None).await {
            // It has ended in another way.
            Err(Error::Superseded { .. } | Error::NotFound { .. } | Error::Gone { .. } | Error::Paused { .. }) => {
                Ok(())
            }
            other => other.map(drop),
        }
    }

    async fn end(
        &self,
        said: Vec<Message>,
        outcome: Outcome,
        error: Option<String>,
        item: Option<(String, Item)>,
    ) -> Result<Seq> {
        let id = &self.session_id;
        let superseded = || Error::Superseded { session_id: id.clone() };
        let ended = self.tenure.write(&self.who, id, Need::Session, |state, _| {
            let session = self.tenure.whole_ref(state, id)?;
            // What this answers must still be there.
            let run = &self.run;
            let kept = self.asked == 0 || session.messages.binary_search_by_key(&self.asked, |m| m.seq).is_ok();
            // Another session may have begun under the id.
            let kept = kept && session.runs.iter().rev().any(|r| r.id == *run);
            if !kept || !session.status.is_live() {
                let error = Some("the session was rewound, replaced or ended meanwhile".to_owned());
                let entry = Entry::RunEnded { run: run.clone(), outcome: Outcome::Cancelled, error };
                return Ok(Draft::new(if session.status.is_live() { vec![entry] } else { Vec::new() }, None));
            }
            let post = |m: &Message| Entry::Message(Post { run: Some(run.clone()), lead: false, message: m.clone() });
            let mut entries: Vec<Entry> = said.iter().map(post).collect();
            if outcome == Outcome::Completed {
                entries.extend(crate::checkpoint::automatic(session, &said, Some(run)));
            }
            entries.push(Entry::RunEnded { run: run.clone(), outcome, error: error.clone() });
            let seq = session.seq + entries.len() as Seq;
            let mut draft = Draft::new(entries, Some(seq));
            draft.items.extend(item.clone());
            Ok(draft)
        });
        match ended.await {
            Ok(seq) => seq.ok_or_else(superseded),
            Err(Error::NotFound { .. }) => Err(superseded()),
            Err(e) => Err(e),
        }
    }
}

async fn listen(
    model: &dyn Model,
    prompt: Prompt,
    answer: &mut Answer,
    listener: &mut Option<mpsc::Sender<Piece>>,
    stall: Duration,
) -> Result<(), TurnError> {
    let mut pieces = model.ask(prompt).await?;
    while let Some(piece) = std::future::poll_fn(|cx| pieces.as_mut().poll_next(cx)).await {
        let piece = piece?;
        answer.take(&piece).map_err(|why| ModelError::Broken { why })?;
        if let Some(to) = listener
            && !matches!(tokio::time::timeout(stall, to.send(piece)).await, Ok(Ok(())))
        {
            *listener = None;
        }
    }
    Ok(())
}
