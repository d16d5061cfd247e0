//! Search: what was said in all sessions that somebody may see, newest first.
//!
//! There is no index and no second copy of the text: the logs themselves are read, straight from the store, a page at a time. What was
//! rewound, erased or purged can not be found, because it is not there.

use crate::rules::matcher::{Needle, snippet};
use crate::rules::redaction::Redaction;
use crate::store::query::{Cursor, HeadPage, Order, Query, Range, Whose};
use crate::tenure::Tenure;
use crate::types::entry::{Entry, Post, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Key, Principal, Seq, SessionId, User};
use crate::types::message::{Message, Role};
use jiff::Timestamp;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// So many cards are asked for at once.
const CARDS: usize = 32;
/// So many records are read at once.
const RECORDS: usize = 128;
/// More text than this is looked through on a thread where nobody else waits.
const MUCH: usize = 256 << 10;

/// What to look for, and where.
#[derive(Clone, Debug)]
pub struct Search {
    /// Words that must all be in a message, in any order, without case and accents; `"words in quotes"` must follow each other; `begin*`
    /// may go on.
    pub text: String,
    /// Only in what was said in this role.
    pub role: Option<Role>,
    /// In which sessions; its `limit` is the number of messages to be found, and its cursor and order are not used.
    pub query: Query,
    /// Where the page before ended.
    pub cursor: Option<SearchCursor>,
    /// A page ends after so many sessions, found or not.
    pub max_sessions: usize,
    /// A page ends after so many bytes of messages.
    pub max_bytes: usize,
    /// A page ends after so many reads of the store: each page of records and each ancestor of a fork is one.
    pub max_reads: usize,
}

impl Search {
    /// Looks for `text` in everything that whoever asks may see.
    pub fn new(text: impl Into<String>, limit: usize) -> Self {
        let query = Query::new(Whose::Everyone, limit);
        Self {
            text: text.into(),
            role: None,
            query,
            cursor: None,
            max_sessions: 500,
            max_bytes: 16 << 20,
            max_reads: 1000,
        }
    }
}

/// A message that was found, or a session by its title.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The session.
    pub session_id: SessionId,
    /// Whose it is.
    pub user: User,
    /// Its title.
    pub title: Option<String>,
    /// When it was last active.
    pub active_at: Timestamp,
    /// The message; nothing if it is the title that was found.
    pub said: Option<FoundMessage>,
    /// The piece of text where it was found, redacted.
    pub snippet: String,
    /// What was looked for in it: from a character to one, exclusive, in order. Characters are Unicode's, not bytes.
    pub highlights: Vec<(usize, usize)>,
}

/// Where a message is that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct FoundMessage {
    /// Its position in the session, from 0.
    pub position: usize,
    /// Its record.
    pub seq: Seq,
    /// Who said it.
    pub role: Role,
    /// When.
    pub at: Timestamp,
}

/// What a search found so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FoundPage {
    /// What was found: the session that was active last comes first, and in it what was said last.
    pub found: Vec<Found>,
    /// Where to go on, if not everything was looked at. There may be more pages although this one has nothing.
    pub next: Option<SearchCursor>,
    /// How many sessions were looked at.
    pub looked_at: usize,
    /// Whether the page ended because of `max_sessions`, `max_bytes` or `max_reads`, before it had all that it may find.
    pub cut: bool,
    /// Sessions that could not be looked at because their log is damaged.
    pub damaged: Vec<SessionId>,
}

/// A place in a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchCursor {
    session: Cursor,
    inside: Option<Inside>,
}

/// A place in a session: what is up to a record was not looked at yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Inside {
    upto: Seq,
    /// The number of messages up to there, which holds as long as the log ends at `seq`.
    messages: usize,
    seq: Seq,
}

impl fmt::Display for SearchCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.inside {
            None => write!(f, "{}", self.session),
            Some(Inside { upto, messages, seq }) => write!(f, "{}~{upto}~{messages}~{seq}", self.session),
        }
    }
}

impl FromStr for SearchCursor {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let wrong = || Error::invalid("cursor", "not a cursor; use the one that came with the page before");
        let mut parts = s.splitn(3, '~');
        let (at, session) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let session = format!("{at}~{session}").parse()?;
        let Some(rest) = parts.next() else { return Ok(Self { session, inside: None }) };
        let numbers: Vec<Seq> = rest.split('~').map(|n| n.parse().map_err(|_| wrong())).collect::<Result<_>>()?;
        match numbers[..] {
            [upto, messages, seq] => {
                Ok(Self { session, inside: Some(Inside { upto, messages: messages as usize, seq }) })
            }
            _ => Err(wrong()),
        }
    }
}

/// A search that goes on.
struct Hunt<'a> {
    who: &'a Principal,
    search: &'a Search,
    needle: Arc<Needle>,
    redaction: &'a Redaction,
    page: FoundPage,
    bytes: usize,
    reads: usize,
}

impl Hunt<'_> {
    fn is_full(&self) -> bool {
        self.page.found.len() >= self.search.query.limit.max(1)
    }

    fn is_over(&self) -> bool {
        self.is_full() || self.bytes >= self.search.max_bytes.max(1) || self.reads >= self.search.max_reads.max(1)
    }

    fn note(&mut self, head: &Head, said: Option<FoundMessage>, (snippet, highlights): (String, Vec<(usize, usize)>)) {
        let title = head.info.title.as_deref().map(|t| self.redaction.apply(t).0.into_owned());
        let (session_id, user, active_at) = (head.info.session_id.clone(), head.user.clone(), head.active_at);
        self.page.found.push(Found { session_id, user, title, active_at, said, snippet, highlights });
    }
}

/// A message on the way through a log.
struct Passed {
    at: FoundMessage,
    message: Message,
}

/// A way back through the log of a session and what it leans on, from the last message to the first.
struct Walk {
    head: Head,
    /// Whose records are read.
    current: Head,
    /// Records up to this one were not read yet.
    upto: Seq,
    /// Messages after this one were seen on an earlier page.
    below: Seq,
    /// How many messages there are up to `upto`.
    messages: usize,
    /// On the way to the place where an earlier page ended. This way is not counted as work: otherwise a search through more ancestors than
    /// one page may read would never go on.
    seeking: bool,
}

impl Walk {
    fn begin(head: Head, inside: Option<Inside>) -> Self {
        let (upto, messages) = match inside {
            Some(inside) if inside.seq == head.seq => (inside.upto.min(head.seq), inside.messages),
            _ => (head.seq, head.mark.messages),
        };
        let below = inside.map_or(Seq::MAX, |i| i.upto);
        Self { current: head.clone(), head, upto, below, messages, seeking: inside.is_some() }
    }

    fn place(&self) -> Inside {
        Inside { upto: self.upto, messages: self.messages, seq: self.head.seq }
    }

    /// The messages among records, newest first, up to the next rewind: what is behind that was cut off.
    fn take(&mut self, records: Vec<Record>) -> Vec<Passed> {
        let mut passed = Vec::new();
        for record in records {
            self.upto = record.seq - 1;
            match record.entry {
                Entry::Rewound(r) => {
                    self.upto = r.to;
                    break;
                }
                Entry::Message(Post { message, .. }) => {
                    self.messages = self.messages.saturating_sub(1);
                    let (position, seq, at, role) = (self.messages, record.seq, record.at, message.role());
                    if seq <= self.below {
                        passed.push(Passed { at: FoundMessage { position, seq, role, at }, message });
                    }
                }
                _ => {}
            }
        }
        passed
    }
}

type Shown = (String, Vec<(usize, usize)>);

/// The messages that have what is looked for, as they may be shown.
fn look(needle: &Needle, redaction: &Redaction, passed: Vec<Passed>) -> Vec<(FoundMessage, Shown)> {
    let found = passed.into_iter().filter_map(|Passed { at, message }| {
        let text = words_of(&message);
        let spots = needle.find(&text)?;
        let (redacted, rules) = redaction.message(&message);
        if rules.is_empty() {
            return Some((at, snippet(&text, &spots)));
        }
        // What must not be seen can not be found either.
        let text = words_of(&redacted);
        Some((at, snippet(&text, &needle.find(&text)?)))
    });
    found.collect()
}

/// What can be found of a message: its texts, and the calls it makes.
fn words_of(message: &Message) -> String {
    let mut text = message.text();
    for call in message.tool_calls() {
        if !text.is_empty() {
            text.push('\n');
        }
        text.extend([&call.name, " ", &call.arguments]);
    }
    text
}

impl Tenure {
    /// Looks for words in what was said in all sessions that somebody may see, newest first, and in their titles. One page is bounded in what
    /// it finds, in the sessions it looks at, in the bytes it reads and in the reads it makes, ancestors of forks included; go on from its end. Sessions that expired or were deleted are left
    /// out unless asked for; what was rewound is not found, nor what is redacted.
    pub async fn search_sessions(&self, who: &Principal, search: &Search) -> Result<FoundPage> {
        let needle = Arc::new(Needle::parse(&search.text)?);
        self.engine.know(&who.tenant).await?;
        let mut query = search.query.clone();
        self.engine.narrow(who, &mut query)?;
        (query.order, query.offset, query.limit) = (Order::Newest, 0, CARDS);
        query.cursor = search.cursor.as_ref().map(|c| c.session.clone());
        let page = FoundPage::default();
        let mut hunt = Hunt { who, search, needle, redaction: self.redaction(), page, bytes: 0, reads: 0 };
        self.hunt_through(who, query, &mut hunt).await?;
        hunt.page.cut = hunt.page.next.is_some() && !hunt.is_full();
        Ok(hunt.page)
    }

    /// Looks through the sessions that a query selects, until one of the bounds is met.
    async fn hunt_through(&self, who: &Principal, mut query: Query, hunt: &mut Hunt<'_>) -> Result<()> {
        let search = hunt.search;
        if let Some(SearchCursor { session, inside: Some(inside) }) = &search.cursor {
            match self.head(who, &session.session).await {
                Ok(head) if query.matches(&head) && query.status.contains(&self.engine.status_of(&head)) => {
                    if !self.look_into(head, Some(*inside), session, hunt).await? {
                        return Ok(());
                    }
                }
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        let mut cards = 0;
        loop {
            let HeadPage { heads, stopped } = self.store().page(&query, self.limits().max_scan).await?;
            // Not the first one: each page goes on by at least one session.
            hunt.reads += usize::from(cards > 0);
            let last = heads.len() < query.limit;
            for head in heads {
                if cards >= search.max_sessions.max(1) || hunt.is_over() {
                    hunt.page.next = query.cursor.clone().map(|session| SearchCursor { session, inside: None });
                    return Ok(());
                }
                cards += 1;
                let place = Cursor::of(&head);
                query.cursor = Some(place.clone());
                // Some may have expired since the last sweep.
                if query.status.contains(&self.engine.status_of(&head))
                    && !self.look_into(head, None, &place, hunt).await?
                {
                    return Ok(());
                }
            }
            if last {
                hunt.page.next = stopped.map(|session| SearchCursor { session, inside: None });
                return Ok(());
            }
        }
    }

    /// Looks through one session. Whether all of it was looked at; if not, the page says where to go on.
    async fn look_into(&self, head: Head, inside: Option<Inside>, place: &Cursor, hunt: &mut Hunt<'_>) -> Result<bool> {
        hunt.page.looked_at += 1;
        let mut walk = Walk::begin(head, inside);
        match self.walk_through(&mut walk, inside.is_none(), hunt).await {
            Ok(true) => Ok(true),
            Ok(false) => {
                hunt.page.next = Some(SearchCursor { session: place.clone(), inside: Some(walk.place()) });
                Ok(false)
            }
            // One session that is damaged does not hide the others.
            Err(Error::Corrupt { place, why }) => {
                let id = walk.head.info.session_id;
                tracing::warn!(session_id = %id, place, why, "a search could not read a session");
                hunt.page.damaged.push(id);
                Ok(true)
            }
            Err(e) => Err(e),
        }
    }

    async fn walk_through(&self, walk: &mut Walk, with_title: bool, hunt: &mut Hunt<'_>) -> Result<bool> {
        let title = walk.head.info.title.clone().filter(|_| with_title && hunt.search.role.is_none());
        if let Some(title) = title.map(|t| hunt.redaction.apply(&t).0.into_owned())
            && let Some(spots) = hunt.needle.find(&title)
        {
            hunt.note(&walk.head, None, snippet(&title, &spots));
        }
        while !hunt.is_over() {
            let Some(records) = self.read_back(walk, &mut hunt.reads).await? else { return Ok(true) };
            let mut passed = walk.take(records);
            let bytes: usize = passed.iter().map(|p| p.message.text_len()).sum();
            hunt.bytes += bytes;
            passed.retain(|p| hunt.search.role.is_none_or(|role| p.at.role == role));
            let found = match bytes > MUCH {
                false => look(&hunt.needle, hunt.redaction, passed),
                true => {
                    // As a read of this principal: at most so many go on at once as it may have reads under way.
                    let _permit = self.engine.browse_permit(hunt.who).await?;
                    let (needle, redaction) = (hunt.needle.clone(), hunt.redaction.clone());
                    let looked = tokio::task::spawn_blocking(move || look(&needle, &redaction, passed)).await;
                    looked.map_err(Error::unavailable)?
                }
            };
            for (at, shown) in found {
                if hunt.is_full() {
                    return Ok(false);
                }
                // If the page is full with this one, the next goes on right behind it.
                let before = (at.seq - 1, at.position);
                hunt.note(&walk.head, Some(at), shown);
                if hunt.is_full() {
                    (walk.upto, walk.messages) = before;
                }
            }
            // Others may want to go on too.
            tokio::task::yield_now().await;
        }
        Ok(false)
    }

    /// The next records on the way back; nothing at the beginning. Adds what it reads to `reads`.
    async fn read_back(&self, walk: &mut Walk, reads: &mut usize) -> Result<Option<Vec<Record>>> {
        loop {
            *reads += usize::from(!walk.seeking);
            if walk.upto >= walk.current.first {
                let range = Range { after: walk.current.first - 1, ..Range::back_from(walk.upto, RECORDS) };
                let records = self.store().records(&walk.current.key(), &range).await?;
                if !records.is_empty() {
                    walk.seeking = false;
                    return Ok(Some(records));
                }
            } else {
                let Some(parent) = walk.current.parent.clone() else { return Ok(None) };
                let key = Key { tenant: walk.head.tenant.clone(), session: parent.session };
                if let Some(next) = self.store().head(&key).await? {
                    (walk.upto, walk.current) = (walk.upto.min(parent.seq), next);
                    continue;
                }
            }
            // Purged while we read, or its records moved to another session: look again.
            let old = &walk.head;
            match self.store().head(&old.key()).await? {
                None => return Ok(None),
                Some(new) if new.info.created_at != old.info.created_at => return Ok(None),
                Some(new) if (new.first, &new.parent) != (old.first, &old.parent) => {
                    // What was passed already is behind us, wherever it is now.
                    let upto = walk.upto.min(walk.below);
                    *walk = Walk { below: upto, ..Walk::begin(new, None) };
                }
                Some(_) => {
                    let place = format!("session {}, record {}", walk.current.key(), walk.upto);
                    return Err(Error::corrupt(place, "it is missing"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::lifecycle::New;

    #[tokio::test]
    async fn a_search_leaves_the_cache_alone() {
        let (tenure, who) = (Tenure::open("memory:").await.unwrap(), Principal::default());
        for i in 0..50 {
            let id = SessionId::new(format!("s{i}")).unwrap();
            tenure.create(&who, New { id: Some(id.clone()), ..New::default() }).await.unwrap();
            tenure.append(&who, &id, vec![Message::user("the ferry")]).await.unwrap();
            tenure.engine.forget(&who.key(&id));
        }
        let hot = SessionId::new("s0").unwrap();
        tenure.load(&who, &hot).await.unwrap();
        let before = (tenure.engine.hot_sessions().len(), tenure.engine.hot_sessions().weight());
        assert_eq!(tenure.search_sessions(&who, &Search::new("ferry", 100)).await.unwrap().found.len(), 50);
        assert_eq!((tenure.engine.hot_sessions().len(), tenure.engine.hot_sessions().weight()), before);
    }
}
