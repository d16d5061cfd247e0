//! Finding a session by content, and making a client's view and ours one.

use crate::entry::{Change, Entry, InfoChange};
use crate::error::Result;
use crate::head::{Head, Status, VisibleHash};
use crate::hot::{Draft, Need};
use crate::id::{Principal, SessionId};
use crate::message::Message;
use crate::reconcile::{Mode, Plan, prefix_hashes, reconcile};
use crate::review::noticed;
use crate::store::{Query, Whose};
use crate::tenure::Tenure;

/// At most so many candidates are looked at when a session is found by content.
const MATCHES: usize = 64;

impl Tenure {
    /// The session that these messages continue, found by content: the one whose whole visible conversation is the longest
    /// beginning of theirs, and of equal ones the last used. Only among the principal's own.
    pub async fn find(&self, who: &Principal, messages: &[Message]) -> Result<Option<SessionId>> {
        let hashes = prefix_hashes(messages);
        if messages.len() < 2 || hashes.is_empty() {
            return Ok(None);
        }
        self.know(&who.tenant).await?;
        // What it was told instead of an answer is in no session, but says in which it was.
        if let Some(id) = messages.iter().rev().find_map(noticed)
            && self.is_continued(who, &id, messages).await?
        {
            return Ok(Some(id));
        }
        let mut heads = self.having(who, hashes.clone()).await?;
        if heads.len() == MATCHES {
            // So many that the longest may not be among them: ask for one length after the other.
            for hash in &hashes {
                heads = self.having(who, vec![*hash]).await?;
                if heads.iter().any(|h| self.status_of(h).is_live()) {
                    break;
                }
            }
        }
        heads.retain(|h| self.status_of(h).is_live());
        // Newest first already; the sort is stable.
        heads.sort_by_key(|h| hashes.iter().position(|x| *x == h.mark.hash));
        if !messages.iter().any(|m| !m.meaning().media.is_empty()) {
            return Ok(heads.first().map(|h| h.info.session_id.clone()));
        }
        // The hash knows texts only: conversations that differ in their pictures are told apart here.
        for head in heads {
            let session = self.fold(head).await?;
            let plan = reconcile(&session, messages, Mode::Full);
            if plan.rewound == 0 {
                return Ok(Some(session.info.session_id.clone()));
            }
        }
        Ok(None)
    }

    /// Whether these messages go on with a session of the principal's own, notices apart.
    async fn is_continued(&self, who: &Principal, id: &SessionId, messages: &[Message]) -> Result<bool> {
        let head = self.store().head(&who.key(id)).await?;
        match head.filter(|h| h.user == who.user && self.status_of(h).is_live()) {
            Some(head) => Ok(reconcile(&self.fold(head).await?, messages, Mode::Full).rewound == 0),
            None => Ok(false),
        }
    }

    /// The principal's own sessions with one of these conversations, newest first.
    async fn having(&self, who: &Principal, hashes: Vec<VisibleHash>) -> Result<Vec<Head>> {
        let mut query = Query::new(Whose::User(who.tenant.clone(), who.user.clone()), MATCHES);
        query.status = vec![Status::Active, Status::Paused];
        query.hashes = hashes;
        self.store().heads(&query).await
    }

    /// Makes a client's view and ours one: cuts off what the client changed, adds what is new, and says what it did.
    pub async fn splice(&self, who: &Principal, id: &SessionId, messages: &[Message], mode: Mode) -> Result<Plan> {
        let (incoming, blobs) = self.detach(messages)?;
        self.write(who, id, Need::Session, |state, _| {
            let session = self.whole_ref(state, id)?;
            self.check_active(session)?;
            let plan = reconcile(session, &incoming, mode);
            let mut entries = Vec::new();
            let mut cut = Vec::new();
            if plan.rewound > 0 {
                let (entry, messages) = crate::checkpoint::rewound(session, plan.keep);
                entries.push(entry);
                cut = messages;
            }
            entries.extend(plan.append.iter().cloned().map(Entry::Message));
            if plan.style != session.style {
                entries.push(Entry::info(InfoChange { style: Change::Set(plan.style), ..InfoChange::default() }));
            }
            let mut draft = Draft::new(entries, plan);
            let used = draft.reply.append.iter().flat_map(|p| p.message.cuts()).map(|c| c.id).collect::<Vec<_>>();
            draft.blobs = blobs.iter().filter(|b| used.contains(&b.id)).cloned().collect();
            draft.cut = cut;
            Ok(draft)
        })
        .await
    }
}
