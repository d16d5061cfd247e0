//! A turn: find the session, make the client's view and ours one, ask the model, keep what it says.
//!
//! What the user said is durable before anything that the model says is used: where nothing else has to be looked up, the model is asked
//! while it is being kept. The answer is durable before the turn is called done. A turn that fails or is stopped keeps what it has and
//! says so (`run_ended`).

use crate::assistant::Assistant;
use crate::busy::{Entered, OnBusy, Pass};
use crate::entry::{Change, Created, Entry, InfoChange, Outcome, Post, Record};
use crate::error::{Error, Result};
use crate::head::Head;
use crate::history::shown;
use crate::hot::{Draft, Need};
use crate::id::{Key, Principal, RunId, Seq, SessionId, Tenant};
use crate::message::Message;
use crate::model::{Beside, First};
use crate::policy::Compact;
use crate::recall::{Recollection, Told, with_block};
use crate::reconcile::{Mode, Plan, reconcile};
use crate::session::{Point, Run, Said, Session};
use crate::store::{Item, Owner, Shelf};
use crate::tenure::Tenure;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Duration;

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
    /// What its run is started with. One that names its `model` can be taken over by another node.
    pub detail: Map<String, Value>,
}

/// What was made of the messages of a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
    /// Memories that the model was told of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memories: Vec<Told>,
}

impl Turn {
    /// Whose session it is in.
    pub fn principal(&self) -> &Principal {
        &self.who
    }

    /// Who writes a summary after it, if the history is over its budget then.
    pub fn compact(&self) -> Compact {
        self.tenure.policy(&self.who.tenant, self.assistant.as_ref().map(|a| a.name.as_str())).compact
    }
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
    pub(crate) tenure: Tenure,
    pub(crate) who: Principal,
    pub(crate) pass: Pass,
    pub(crate) remember: bool,
    /// The message that is answered; 0: there is none.
    pub(crate) asked: Seq,
    /// The assistant that the session belongs to.
    pub(crate) assistant: Option<Arc<Assistant>>,
    /// The session.
    pub session_id: SessionId,
    /// The id of this turn's run.
    pub run: RunId,
    /// What was made of the request's messages.
    pub spliced: Spliced,
    /// What the model is to be shown first; nothing: the run goes on from where it stands.
    pub messages: Vec<Message>,
    /// What the run was started with.
    pub detail: Map<String, Value>,
    /// When it was.
    pub started_at: Timestamp,
    /// When this node began to work on it.
    pub(crate) claimed_at: Timestamp,
    /// What the model is told of what is remembered.
    pub(crate) recalled: Option<Recollection>,
    /// It is being asked already.
    pub(crate) asking: Beside,
}

/// In the detail of a run: somebody may ask for its answer again.
pub(crate) const KEYED: &str = "keyed";
const KEYS: &str = "turn-keys";
pub(crate) const ANSWERS: &str = "turn-answers";
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
        self.begin_turn(who, ask, None).await
    }

    /// The same, and asks the model already while what the client says is being kept. Nothing of its answer is used before that is done,
    /// and if it can not be kept, the model is left alone. In a new session, or where there is an assistant, or media, it is asked afterwards.
    pub async fn turn_asking(&self, who: &Principal, ask: Ask, first: &First) -> Result<Begun> {
        self.begin_turn(who, ask, Some(first)).await
    }

    async fn begin_turn(&self, who: &Principal, ask: Ask, first: Option<&First>) -> Result<Begun> {
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
        let fresh = || ask.idempotency.as_ref().map_or_else(SessionId::generate, |(key, body)| same_id(who, key, body));
        let mut id = match (&claim, &ask.session) {
            (Some(claim), _) => claim.session.clone(),
            (None, Some(id)) => id.clone(),
            (None, None) if ask.content_matching => self.find(who, &incoming).await?.unwrap_or_else(fresh),
            (None, None) => fresh(),
        };
        // Two nodes that get the same request at once give it the same run.
        let run = ask.idempotency.as_ref().map_or_else(RunId::generate, |(key, body)| same_run(who, key, body));
        let (mut tries, mut waited, mut redo) = (0, Duration::ZERO, false);
        while tries <= self.limits().max_retries {
            let key = who.key(&id);
            let pass = match self.gates().enter(&key, on_busy, self.limits().max_queue).await? {
                Entered::Pass(pass) => pass,
                Entered::Branch(before) => {
                    id = self.fork(who, &id, Point::Position(before), None).await?.info.session_id;
                    tries += 1;
                    continue;
                }
            };
            let claim = self.claimed(who, &ask).await?;
            if let Some(claim) = &claim
                && let Some(body) = self.answer_of(who, claim).await?
            {
                return Ok(Begun::Before { session_id: id, run, body });
            }
            let opening_at = self.now();
            let opening = Opening { ask: &ask, incoming: &incoming, run: &run, redo, first, beside: Beside::default() };
            if let (Some((key, body)), None) = (&ask.idempotency, &claim) {
                self.remember_key(who, key, Claim { body: body.clone(), session: id.clone(), run: run.clone() })
                    .await?;
            }
            let open = async {
                match self.open_turn(who, &id, &opening, &blobs).await {
                    Err(Error::NotFound { .. }) => self.open_fresh(who, &id, &opening, &blobs).await,
                    other => other,
                }
            };
            let opened = match opening.beside.during(open).await {
                Ok(opened) => opened,
                // Another node is at it; if with this very request, that is waited for, never stopped or left aside.
                Err(e @ Error::Busy { .. }) => {
                    drop(pass);
                    let same = self.head(who, &id).await.is_ok_and(|h| h.run.as_ref() == Some(&run));
                    match on_busy {
                        OnBusy::Queue => self.wait_for(&key, &mut waited).await?,
                        _ if same => self.wait_for(&key, &mut waited).await?,
                        OnBusy::Branch => {
                            let before = self.head(who, &id).await?.mark.turns.saturating_sub(1);
                            id = self.fork(who, &id, Point::Turn(before), None).await?.info.session_id;
                        }
                        _ => return Err(e),
                    }
                    continue;
                }
                // Another node has just done it: its answer is there now.
                Err(Error::Conflict { .. }) if !redo => {
                    redo = true;
                    continue;
                }
                Err(Error::Gone { status, session_id }) => {
                    self.reopen(who, &session_id, status, ask.on_expired).await?;
                    tries += 1;
                    continue;
                }
                // Made by somebody else just now, or somebody else's: the next look tells.
                Err(Error::Exists { session_id }) => {
                    self.head(who, &session_id).await?;
                    tries += 1;
                    continue;
                }
                Err(e) => return Err(e),
            };
            let asking = opening.beside;
            pass.began(opened.before);
            let started_at = opening_at;
            let recalled = self.recollect(who, &id, opened.assistant.as_deref(), &opened.messages).await;
            let assistant = self.assistant_of(who, opened.assistant.or_else(|| ask.assistant.clone())).await?;
            let block = recalled.as_ref().map(|r| &r.block);
            let messages = match opened.goes_on {
                true => Vec::new(),
                false => with_block(self.prompt(&who.tenant, assistant.as_deref(), opened.messages).await?, block),
            };
            let (tenure, who, remember) = (self.clone(), who.clone(), ask.idempotency.is_some());
            let (asked, mut spliced, detail) = (opened.asked, opened.spliced, ask.detail);
            spliced.memories = recalled.as_ref().map(|r| r.told.clone()).unwrap_or_default();
            let session_id = id;
            let turn = Turn {
                tenure,
                who,
                pass,
                remember,
                asked,
                assistant,
                session_id,
                run,
                spliced,
                messages,
                detail,
                started_at,
                claimed_at: started_at,
                recalled,
                asking,
            };
            return Ok(Begun::Turn(Box::new(turn)));
        }
        Err(Error::Conflict { session_id: id, expected: 0 })
    }

    /// The run that a request with this key and body began, if it did.
    pub async fn started(&self, who: &Principal, key: &str, body: &str) -> Result<Option<(SessionId, RunId)>> {
        let ask = Ask { idempotency: Some((key.to_owned(), body.to_owned())), ..Ask::default() };
        let Some(claim) = self.claimed(who, &ask).await? else { return Ok(None) };
        match self.run(who, &claim.session, &claim.run).await {
            Ok(_) => Ok(Some((claim.session, claim.run))),
            Err(Error::NotFound { .. } | Error::NoSuchRun { .. } | Error::Gone { .. }) => Ok(None),
            Err(e) => Err(e),
        }
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
        let assistant = self.assistant_of(who, assistant).await?;
        let mut messages: Vec<Message> = instructions(assistant.as_deref()).collect();
        let Some(session) = session else {
            messages.extend(ask.messages.iter().cloned());
            return Ok(messages);
        };
        let plan = reconcile(&session, &ask.messages, ask.mode);
        let window = self.policy(&who.tenant, session.assistant.as_deref()).window;
        let new = said(&plan, session.seq);
        messages.extend(shown(&after(&session, &plan, &new), &session.summaries, &window));
        Ok(messages)
    }

    pub(crate) async fn assistant_of(&self, who: &Principal, name: Option<String>) -> Result<Option<Arc<Assistant>>> {
        match name {
            Some(name) => self.assistant(who, &name).await,
            None => Ok(None),
        }
    }

    /// What a model is shown: its instructions, and what was said, with its media.
    pub(crate) async fn prompt(
        &self,
        tenant: &Tenant,
        assistant: Option<&Assistant>,
        said: Vec<Message>,
    ) -> Result<Vec<Message>> {
        let mut messages: Vec<Message> = instructions(assistant).collect();
        messages.reserve(said.len());
        for message in said {
            messages.push(match message.cuts().is_empty() {
                true => message,
                false => self.attach_message(tenant, &message).await?,
            });
        }
        Ok(messages)
    }

    /// Waits a little for another node to be done with a session.
    async fn wait_for(&self, key: &Key, waited: &mut Duration) -> Result<()> {
        let pause = (*waited / 4).clamp(Duration::from_millis(20), Duration::from_millis(500));
        *waited += pause;
        if *waited > self.limits().max_wait {
            return Err(Error::Busy { session_id: key.session.clone() });
        }
        let watch = self.watch(key);
        let _ = tokio::time::timeout(pause, watch.elsewhere()).await;
        Ok(())
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
        self.write(who, id, Need::Session, |state, now| {
            let session = self.whole_ref(state, id)?;
            self.check_active(session)?;
            if opening.is_done(session) {
                return Err(Error::Conflict { session_id: id.clone(), expected: session.seq });
            }
            let plan = opening.plan(session);
            let mut entries: Vec<Entry> =
                self.step_in(session, opening.run, opening.ask.on_busy, now)?.into_iter().collect();
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
            let (goes_on, claim) = (opening.goes_on(session), self.claim(now));
            entries.push(match session.head().run.as_ref() == Some(opening.run) {
                true => Entry::RunClaimed { run: opening.run.clone(), claim },
                false => opening.started(claim),
            });
            let asked = if goes_on { 0 } else { asked };
            let opened = Opened { goes_on, ..self.opened(session, &plan, asked) };
            self.ask_beside(who, opening, &opened);
            let mut draft = Draft::new(entries, opened);
            let used: Vec<_> = plan.append.iter().flat_map(|p| p.message.cuts()).map(|c| c.id).collect();
            draft.blobs = blobs.iter().filter(|b| used.contains(&b.id)).cloned().collect();
            draft.cut = cut;
            Ok(draft)
        })
        .await
    }

    /// Ends the run that is still on, if this turn may: the gate is ours, so it belongs to another node, or to nobody any more.
    pub(crate) fn step_in(
        &self,
        session: &Session,
        by: &RunId,
        on_busy: OnBusy,
        now: Timestamp,
    ) -> Result<Option<Entry>> {
        let Some(run) = session.head().run.clone() else { return Ok(None) };
        let lease = session.head().lease.as_ref().filter(|l| l.node != self.node());
        let lasting = session.run(&run).is_some_and(|r| r.detail.contains_key("model"));
        let at_work = lease.is_some_and(|l| match lasting {
            // Somebody will take it over.
            true => !self.is_free(l, now.saturating_sub(self.lease()).unwrap_or(now)),
            false => !self.is_free(l, now),
        });
        // The same request at another node: never stopped by itself.
        let same = run == *by;
        if at_work && (same || on_busy != OnBusy::Interrupt) {
            return Err(Error::Busy { session_id: session.info.session_id.clone() });
        }
        if same {
            return Ok(None);
        }
        let (outcome, error, code) = match at_work {
            true => (Outcome::Cancelled, "another request interrupted it", "interrupted"),
            false => (Outcome::Failed, "the node that worked on it has stopped", "abandoned"),
        };
        Ok(Some(Entry::RunEnded { run, outcome, error: Some(error.to_owned()), code: Some(code.to_owned()) }))
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
        let more = (2..).zip(posts.chain([opening.started(self.claim(now))])).map(|(seq, entry)| Record {
            seq,
            at: now,
            entry,
        });
        // The model is not asked meanwhile: the id may turn out to be somebody else's.
        self.begin_with(&key, &first, more.collect(), blobs.to_vec()).await?;
        Ok(self.opened(&empty, &plan, asked))
    }

    /// Lets the model be asked while a turn's beginning is being kept, if what it will be shown is known.
    fn ask_beside(&self, who: &Principal, opening: &Opening<'_>, opened: &Opened) {
        let Some(first) = opening.first else { return };
        let assisted = opened.assistant.is_some() || opening.ask.assistant.is_some();
        let whole = opened.messages.iter().all(|m| m.cuts().is_empty());
        if !assisted && whole && !opened.goes_on && !self.tells(&who.tenant, None) {
            opening.beside.set(first.ask(opened.messages.clone()));
        }
    }

    fn opened(&self, session: &Session, plan: &Plan, asked: Seq) -> Opened {
        let window = self.policy(&session.tenant, session.assistant.as_deref()).window;
        let new = said(plan, session.seq);
        Opened {
            goes_on: false,
            before: plan.keep.min(session.messages.len()),
            asked,
            assistant: session.assistant.clone(),
            messages: shown(&after(session, plan, &new), &session.summaries, &window),
            spliced: Spliced {
                matched: plan.matched,
                spliced: plan.spliced,
                rewound: plan.rewound,
                appended: plan.append.len(),
                orphans: plan.orphans.clone(),
                memories: Vec::new(),
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

    pub(crate) fn item(&self, key: &str, value: String) -> Item {
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

fn same_hash(who: &Principal, key: &str, body: &str) -> String {
    blake3::hash(format!("{}\0{}\0{key}\0{body}", who.tenant, who.user).as_bytes()).to_hex()[..32].to_owned()
}

/// The session that a request with a key begins, if it names none.
fn same_id(who: &Principal, key: &str, body: &str) -> SessionId {
    SessionId::new(same_hash(who, key, body)).unwrap_or_else(|_| SessionId::generate())
}

/// The run of a request with a key.
fn same_run(who: &Principal, key: &str, body: &str) -> RunId {
    RunId::new(format!("run_{}", same_hash(who, key, body))).unwrap_or_else(|_| RunId::generate())
}

fn keys(who: &Principal) -> Shelf {
    Shelf { tenant: who.tenant.clone(), owner: Owner::User(who.user.clone()), name: KEYS.to_owned() }
}

/// What a model is told before anything else.
fn instructions(assistant: Option<&Assistant>) -> impl Iterator<Item = Message> {
    assistant.and_then(|a| a.instructions.as_deref()).map(Message::system).into_iter()
}

/// What a turn begins with.
struct Opening<'a> {
    ask: &'a Ask,
    incoming: &'a [Message],
    run: &'a RunId,
    /// What was done before is done again: its answer is not there any more.
    redo: bool,
    /// Whom to ask meanwhile, and where.
    first: Option<&'a First>,
    beside: Beside,
}

/// A turn whose beginning is kept.
struct Opened {
    /// Its run was left behind by another node, and goes on from where it stands.
    goes_on: bool,
    before: usize,
    asked: Seq,
    assistant: Option<String>,
    messages: Vec<Message>,
    spliced: Spliced,
}

impl Opening<'_> {
    /// Whether another node has done this very request meanwhile.
    fn is_done(&self, session: &Session) -> bool {
        let completed = |r: &Run| r.id == *self.run && r.ended.is_some_and(|(_, o)| o == Outcome::Completed);
        !self.redo && session.runs.last().is_some_and(completed)
    }

    /// Whether this very request came before, and has not ended or has called tools: what was done until then stays done.
    fn goes_on(&self, session: &Session) -> bool {
        let mut same = session.runs.iter().rev().take_while(|r| r.id == *self.run);
        session.head().run.as_ref() == Some(self.run) || same.any(|r| !r.tools_started.is_empty())
    }

    fn plan(&self, session: &Session) -> Plan {
        let mut plan = reconcile(session, self.incoming, self.ask.mode);
        let (stored, matched) = (&session.messages, self.incoming.len());
        if self.goes_on(session) {
            return Plan { keep: stored.len(), append: Vec::new(), rewound: 0, matched, ..plan };
        }
        if session.runs.last().is_some_and(|r| r.id == *self.run) {
            // The same request came before. What it said is there, and nobody has said anything since. What was answered before it broke
            // off is no answer.
            let keep = stored.iter().rposition(|m| m.run.as_ref() != Some(self.run)).map_or(0, |i| i + 1);
            plan = Plan { keep, append: Vec::new(), rewound: stored.len() - keep, matched, ..plan };
        }
        plan
    }

    fn started(&self, claim: crate::entry::Claim) -> Entry {
        let mut detail = self.ask.detail.clone();
        if self.ask.idempotency.is_some() {
            detail.insert(KEYED.to_owned(), Value::Bool(true));
        }
        Entry::RunStarted { run: self.run.clone(), claim: Some(claim), detail }
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
