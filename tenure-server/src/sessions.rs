//! What is done to a session besides the change in the store: its workspace, its transcript, and the tools that run for it.

use crate::app::App;
use crate::workspace::{RestorePlan, RestoredWorkspace, WorkspaceError};
use serde_json::{Map, Value};
use tenure::store::SessionCursor;
use tenure::{
    ErasureReceipt, Error, Head, OwnerFilter, Point, Principal, RewindResult, Seq, SessionId, SessionKey, SessionQuery,
    Status, Tenure, Tools, User,
};

/// Sessions that are read at once.
const PAGE: usize = 256;

/// Why something could not be done to a session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The store refused, or failed.
    #[error(transparent)]
    Store(#[from] Error),
    /// The workspace of the session stands in the way.
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
}

/// How a session is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeletionReport {
    /// It can be restored until its retention ends.
    Restorable,
    /// It is destroyed.
    Purge,
}

/// A rewind, and whether the workspace goes back as well.
#[derive(Clone, Debug)]
pub struct RewindRequest {
    /// The point to go back to.
    pub to: Point,
    /// Where the log must end for it to be done.
    pub expected: Option<Seq>,
    /// Whether the session's workspace goes back too.
    pub workspace: bool,
}

/// A handle that refuses to write to a session whose log ends elsewhere.
fn expecting(tenure: &Tenure, expected: Option<Seq>) -> Tenure {
    expected.map_or_else(|| tenure.clone(), |seq| tenure.expecting(seq))
}

/// Deletes a session with its transcript; then its tools end and its workspace is committed. Whether there was one.
pub async fn delete(
    app: &App,
    who: &Principal,
    id: &SessionId,
    deletion: DeletionReport,
    expected: Option<Seq>,
) -> tenure::Result<bool> {
    let tenure = expecting(&app.tenure, expected);
    let head = match app.workspaces {
        Some(_) => app.tenure.head(who, id).await.ok(),
        None => None,
    };
    let delete = async {
        match deletion {
            DeletionReport::Purge => tenure.purge(who, id).await,
            DeletionReport::Restorable => tenure.delete(who, id).await,
        }
    };
    let deleted = app.transcripts.take_away(&app.tenure, who, id, delete).await?;
    if deleted {
        if let Some(head) = head {
            commit_workspace(app, &head).await;
        }
        app.tools.end(&SessionKey { tenant: who.tenant.clone(), session: id.clone() }).await;
    }
    Ok(deleted)
}

/// Erases all of a user: their sessions and transcripts; then their tools end and their workspaces are committed, as with each
/// session that is deleted.
pub async fn erase_user(app: &App, who: &Principal, user: &User) -> tenure::Result<ErasureReceipt> {
    let heads = sessions_of(app, who, user).await?;
    let receipt = app.tenure.erase(who, user).await?;
    app.transcripts.erase(&who.tenant, user).await?;
    for head in &heads {
        // The workspaces of others were committed when their sessions ended.
        if head.status.is_live() {
            commit_workspace(app, head).await;
        }
        app.tools.end(&head.key()).await;
    }
    Ok(receipt)
}

/// All sessions of a user, those that have ended included.
async fn sessions_of(app: &App, who: &Principal, user: &User) -> tenure::Result<Vec<Head>> {
    let mut query = SessionQuery::new(OwnerFilter::User(who.tenant.clone(), user.clone()), PAGE);
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

/// Commits the workspace of a session that was deleted. It stays where it is, so a failure loses nothing.
async fn commit_workspace(app: &App, head: &Head) {
    if let Some(workspaces) = &app.workspaces
        && let Err(why) = workspaces.keep(head, head.seq, "the session was deleted").await
    {
        tracing::warn!(session_id = %head.info.session_id, %why, "the workspace of a deleted session could not be committed");
    }
}

/// Checks that metadata which a session is to have names a workspace that can be one.
pub async fn check_workspace(app: &App, who: &Principal, metadata: &Map<String, Value>) -> Result<(), WorkspaceError> {
    match &app.workspaces {
        Some(workspaces) => workspaces.check(&who.tenant, metadata).await,
        None => Ok(()),
    }
}

/// Rewinds a session, and its workspace if that is asked for: to its newest commit at or before that point. If the workspace can
/// not go back, nothing is changed.
pub async fn rewind(
    app: &App,
    who: &Principal,
    id: &SessionId,
    request: RewindRequest,
) -> Result<(RewindResult, Option<RestoredWorkspace>), SessionError> {
    let RewindRequest { to, expected, workspace } = request;
    let plan = if workspace { Some(find_commit(app, who, id, &to).await?) } else { None };
    let done = expecting(&app.tenure, expected).rewind(who, id, to).await?;
    let restored = match plan {
        Some(plan) => Some(plan.restore(done.seq).await?),
        None => None,
    };
    Ok((done, restored))
}

async fn find_commit(app: &App, who: &Principal, id: &SessionId, to: &Point) -> Result<RestorePlan, SessionError> {
    let workspaces = app.workspaces.as_ref().ok_or(WorkspaceError::Disabled)?;
    let (head, place) = app.tenure.view(who, id, |s| (s.head().clone(), s.locate(to))).await?;
    let Some(point) = place else {
        return Err(Error::NoSuchPoint { session_id: id.clone(), what: to.to_string() }.into());
    };
    Ok(workspaces.find(head, point.seq, to.to_string()).await?)
}

/// The model that an assistant names.
pub async fn assistant_model(app: &App, who: &Principal, assistant: &str) -> tenure::Result<Option<String>> {
    Ok(app.tenure.assistant(who, assistant).await?.and_then(|a| a.model.clone()))
}

/// The models that a session names, the preferred one first: its assistant's, and the one that it talked to last.
pub async fn preferred_models(app: &App, who: &Principal, head: &Head) -> tenure::Result<Vec<String>> {
    let assistant = match &head.assistant {
        Some(name) => assistant_model(app, who, name).await?,
        None => None,
    };
    Ok(assistant.into_iter().chain(head.info.model.clone()).collect())
}

/// The first of the models that a session names which can still be asked.
pub async fn available_model(app: &App, who: &Principal, head: &Head) -> tenure::Result<Option<String>> {
    let names = preferred_models(app, who, head).await?;
    Ok(names.into_iter().find(|name| app.models.get(name).is_some()))
}
