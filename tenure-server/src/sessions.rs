//! Operations on sessions that have effects outside the store: on the session's workspace, its transcript and
//! its running tools. All handlers use these functions, so that the effects are the same on every route.

use crate::app::App;
use crate::workspace::{RestorePlan, RestoredWorkspace, WorkspaceError};
use serde_json::{Map, Value};
use tenure::store::SessionCursor;
use tenure::{
    Error, Point, Principal, Rewind, Seq, SessionId, User,
    log::Head,
    maintenance::ErasureReceipt,
    run::OnExpired,
    session::{OwnerFilter, RewindResult, SessionQuery, Status},
};

/// Passes on the result of an operation that continues a session. If it failed because the session has expired,
/// applies `on_expired` and returns `None`: the operation must be executed again.
pub async fn unless_expired<T>(
    app: &App,
    principal: &Principal,
    id: &SessionId,
    on_expired: OnExpired,
    result: tenure::Result<T>,
) -> tenure::Result<Option<T>> {
    match result {
        Err(Error::Gone { status: "expired", .. }) => {
            app.tenure.ensure_live(principal, id, on_expired).await?;
            Ok(None)
        }
        result => result.map(Some),
    }
}

/// Page size when the sessions of a user are listed.
const PAGE: usize = 256;

/// The error of an operation on a session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The store rejected the operation or failed.
    #[error(transparent)]
    Store(#[from] Error),
    /// The session's workspace does not allow the operation.
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
}

/// The kind of a deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeletionMode {
    /// A soft delete: the session can be restored until its retention ends.
    Restorable,
    /// A hard delete: the session's data is removed permanently.
    Purge,
}

/// Parameters of a rewind.
#[derive(Clone, Debug)]
pub struct RewindRequest {
    /// The point to rewind to.
    pub to: Point,
    /// The sequence number at which the log must end (optimistic concurrency); otherwise the rewind is
    /// rejected. `None` means unconditional.
    pub expected: Option<Seq>,
    /// Whether to restore the session's workspace as well.
    pub workspace: bool,
}

/// Deletes a session and its transcript, then commits its workspace. Returns whether the
/// session existed; if not, nothing else is done.
pub async fn delete(
    app: &App,
    principal: &Principal,
    id: &SessionId,
    deletion: DeletionMode,
    expected: Option<Seq>,
) -> tenure::Result<bool> {
    let head = match app.workspaces {
        Some(_) => app.tenure.head(principal, id).await.ok(),
        None => None,
    };
    let delete = async {
        match deletion {
            DeletionMode::Purge => app.tenure.purge(principal, id, expected).await,
            DeletionMode::Restorable => app.tenure.delete(principal, id, expected).await,
        }
    };
    let deleted = app.transcripts.delete_session_and_transcript(&app.tenure, principal, id, delete).await?;
    if let Some(head) = head.filter(|_| deleted) {
        commit_workspace(app, &head).await;
    }
    Ok(deleted)
}

/// Erases all data of a user: sessions and transcripts. Afterwards their workspaces are committed and their
/// tools are ended, as for every session that is deleted.
pub async fn erase_user(app: &App, principal: &Principal, user: &User) -> tenure::Result<ErasureReceipt> {
    let heads = sessions_of(app, principal, user).await?;
    let receipt = app.tenure.erase(principal, user).await?;
    app.transcripts.erase(&principal.tenant, user).await?;
    for head in &heads {
        // Workspaces of expired and deleted sessions were committed when those sessions ended.
        if head.status.is_live() {
            commit_workspace(app, head).await;
        }
    }
    Ok(receipt)
}

/// Lists the heads of all sessions of a user, including expired and deleted ones.
async fn sessions_of(app: &App, principal: &Principal, user: &User) -> tenure::Result<Vec<Head>> {
    let mut query = SessionQuery::new(OwnerFilter::User(principal.tenant.clone(), user.clone()), PAGE);
    query.status = vec![Status::Active, Status::Paused, Status::Expired, Status::Deleted];
    let mut all = Vec::new();
    loop {
        let page = app.tenure.store().heads(&query).await?;
        query.cursor = page.last().map(SessionCursor::of);
        let is_last = page.len() < query.limit;
        all.extend(page);
        if is_last {
            return Ok(all);
        }
    }
}

/// Commits the workspace of a deleted session. A failure is only logged: the files stay where they are, so
/// nothing is lost.
async fn commit_workspace(app: &App, head: &Head) {
    if let Some(workspaces) = &app.workspaces
        && let Err(error) = workspaces.commit(head, head.seq, "the session was deleted").await
    {
        tracing::warn!(session_id = %head.info.session_id, %error, "could not commit the workspace of a deleted session; its files are unchanged");
    }
}

/// Validates the workspace that new session metadata names. Succeeds if workspaces are disabled.
pub async fn check_workspace(
    app: &App,
    principal: &Principal,
    metadata: &Map<String, Value>,
) -> Result<(), WorkspaceError> {
    match &app.workspaces {
        Some(workspaces) => workspaces.check(&principal.tenant, metadata).await,
        None => Ok(()),
    }
}

/// Rewinds a session and, on request, restores its workspace to the newest commit at or before that point
/// (D-114). The commit is looked up before the rewind: if there is none, nothing is changed. If restoring the
/// files fails afterwards, an error is returned and the session stays rewound.
pub async fn rewind(
    app: &App,
    principal: &Principal,
    id: &SessionId,
    request: RewindRequest,
) -> Result<(RewindResult, Option<RestoredWorkspace>), SessionError> {
    let RewindRequest { to, expected, workspace } = request;
    let plan = if workspace { Some(find_commit(app, principal, id, &to).await?) } else { None };
    let rewound = app.tenure.rewind(principal, id, Rewind::to(to).if_match(expected)).await?;
    let restored = match plan {
        Some(plan) => Some(plan.restore(rewound.seq).await?),
        None => None,
    };
    Ok((rewound, restored))
}

async fn find_commit(
    app: &App,
    principal: &Principal,
    id: &SessionId,
    to: &Point,
) -> Result<RestorePlan, SessionError> {
    let workspaces = app.workspaces.as_ref().ok_or(WorkspaceError::Disabled)?;
    let (head, resolved) = app.tenure.with_session(principal, id, |s| (s.head().clone(), s.locate(to))).await?;
    let Some(point) = resolved else {
        return Err(Error::NoSuchPoint { session_id: id.clone(), point: to.to_string() }.into());
    };
    Ok(workspaces.find(head, point.seq, to.to_string()).await?)
}

/// The model configured for an assistant. `None` means that the assistant does not exist or names no model.
pub async fn assistant_model(app: &App, principal: &Principal, assistant: &str) -> tenure::Result<Option<String>> {
    Ok(app.tenure.assistant(principal, assistant).await?.and_then(|a| a.model.clone()))
}

/// The model names associated with a session, in order of preference: its assistant's, then the one it used
/// last. They need not be configured any more.
pub async fn preferred_models(app: &App, principal: &Principal, head: &Head) -> tenure::Result<Vec<String>> {
    let assistant = match &head.assistant {
        Some(name) => assistant_model(app, principal, name).await?,
        None => None,
    };
    Ok(assistant.into_iter().chain(head.info.model.clone()).collect())
}

/// The most preferred model of a session that is still configured.
pub async fn available_model(app: &App, principal: &Principal, head: &Head) -> tenure::Result<Option<String>> {
    let names = preferred_models(app, principal, head).await?;
    Ok(names.into_iter().find(|name| app.models.get(name).is_some()))
}
