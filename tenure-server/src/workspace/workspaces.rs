//! Commits and restores the workspaces of all sessions.

use super::error::{METADATA_KEY, WorkspaceError};
use super::note::CommitNote;
use super::repository::SessionRepository;
use super::tree::{TreeLimits, is_git};
use crate::config::workspaces as config;
use anyhow::Context;
use git2::Oid;
use serde_json::{Map, Value};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tenure::log::Head;
use tenure::rules::excerpt;
use tenure::session::{expand_home, file_name};
use tenure::{Seq, Tenant, Tenure};

/// Directory below the root with a lock file for each workspace that was ever locked. No tenant's directory begins
/// with a dot.
const LOCKS: &str = ".locks";

/// Timeout of a workspace operation.
const MAX_TIME: Duration = Duration::from_secs(60);

/// Maximum length of a workspace name in bytes.
const MAX_NAME: usize = 255;

/// The workspaces below `workspaces.root`, one directory per tenant.
#[derive(Debug)]
pub struct Workspaces {
    root: PathBuf,
    checkpoints: bool,
    limits: TreeLimits,
}

impl Workspaces {
    /// Creates the workspaces from the configuration. Returns `None` if they are not enabled.
    pub fn new(config: &config::WorkspacesConfig) -> anyhow::Result<Option<Arc<Self>>> {
        if config.root.is_empty() {
            return Ok(None);
        }
        let root = expand_home(&config.root);
        let open = || std::fs::create_dir_all(root.join(LOCKS)).and_then(|()| std::fs::canonicalize(&root));
        let root = open().with_context(|| format!("workspaces.root: cannot use {}", config.root))?;
        let limits = TreeLimits { max_files: config.max_files, max_bytes: config.max_bytes };
        Ok(Some(Arc::new(Self { root, checkpoints: config.checkpoints, limits })))
    }

    /// Registers hooks that commit workspaces when sessions end and, if `workspaces.checkpoints` is set, at
    /// checkpoints.
    pub fn install(self: Arc<Self>, tenure: &Tenure) {
        let this = self.clone();
        tenure.on_expire(move |session, _| {
            let this = this.clone();
            async move { Ok(this.commit(session.head(), session.head().seq, "end of the session").await?) }
        });
        if self.checkpoints {
            tenure.on_checkpoint(move |head, label, seq| {
                let this = self.clone();
                async move { Ok(this.commit(&head, seq, &format!("checkpoint {label}")).await?) }
            });
        }
    }

    /// Resolves the path of a workspace. It must exist inside the tenant's own directory, after symbolic links are
    /// resolved.
    fn resolve_directory(&self, tenant: &Tenant, name: &str) -> Result<PathBuf, WorkspaceError> {
        check_name(name)?;
        let tenant_dir = self.root.join(file_name(tenant.as_str()));
        let directory = tenant_dir.join(name);
        let resolved = directory.canonicalize();
        let resolved = resolved.map_err(|e| {
            WorkspaceError::InvalidName(format!(
                "no workspace directory {name:?} of tenant {tenant}: {e}; create it first"
            ))
        })?;
        if !resolved.starts_with(&tenant_dir) || resolved == tenant_dir {
            return Err(WorkspaceError::InvalidName(format!(
                "the workspace {name:?} is outside the directory of tenant {tenant}"
            )));
        }
        if resolved.is_dir() {
            Ok(resolved)
        } else {
            Err(WorkspaceError::InvalidName(format!("the workspace {name:?} is not a directory")))
        }
    }

    fn open(&self, directory: &Path) -> Result<SessionRepository, WorkspaceError> {
        let name = blake3::hash(directory.as_os_str().as_encoded_bytes()).to_hex();
        SessionRepository::open(directory, &self.root.join(LOCKS).join(name.as_str()))
    }

    /// Runs blocking work (libgit2, file system) on a blocking thread with a timeout. Removes the root's path from
    /// errors, because it must not be disclosed.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, WorkspaceError> + Send + 'static,
    ) -> Result<T, WorkspaceError> {
        let result = match tokio::time::timeout(MAX_TIME, tokio::task::spawn_blocking(work)).await {
            Ok(result) => result.unwrap_or_else(|e| Err(WorkspaceError::Failed(format!("workspace: {e}")))),
            // The work continues in the background, and holds the lock until it is done.
            Err(_) => Err(WorkspaceError::Failed(format!(
                "the workspace operation timed out after {} s; it continues in the background",
                MAX_TIME.as_secs()
            ))),
        };
        result.map_err(|e| match e {
            WorkspaceError::Failed(reason) => {
                WorkspaceError::Failed(reason.replace(&format!("{}/", self.root.display()), ""))
            }
            other => other,
        })
    }

    /// Commits a session's workspace, if it has one and its files have changed.
    pub async fn commit(self: &Arc<Self>, head: &Head, seq: Seq, subject: &str) -> Result<(), WorkspaceError> {
        let name = match workspace_name(&head.info.metadata) {
            Ok(Some(name)) => name.to_owned(),
            Ok(None) => return Ok(()),
            // The metadata predates the workspaces feature, so it never denoted a workspace.
            Err(reason) => {
                tracing::warn!(session_id = %head.info.session_id, %reason, "a session names an invalid workspace; it is not committed");
                return Ok(());
            }
        };
        let this = self.clone();
        let tenant = head.tenant.clone();
        let note = CommitNote::new(head, Some(seq), subject);
        self.blocking(move || {
            let repo = this.open(&this.resolve_directory(&tenant, &name)?)?;
            let tree = repo.read(this.limits, None)?;
            repo.commit(&note, tree).map(drop)
        })
        .await
    }

    /// Checks that new metadata of a session names no workspace, or a valid and existing one (D-116).
    pub async fn check(self: &Arc<Self>, tenant: &Tenant, metadata: &Map<String, Value>) -> Result<(), WorkspaceError> {
        let Some(name) = workspace_name(metadata)?.map(str::to_owned) else { return Ok(()) };
        let this = self.clone();
        let tenant = tenant.clone();
        self.blocking(move || this.resolve_directory(&tenant, &name).map(drop)).await
    }

    /// Finds the newest commit at or before a record of a session; `point` describes that point in errors. Restores
    /// nothing.
    pub async fn find(self: &Arc<Self>, head: Head, seq: Seq, point: String) -> Result<RestorePlan, WorkspaceError> {
        let Some(name) = workspace_name(&head.info.metadata)?.map(str::to_owned) else {
            return Err(WorkspaceError::Unnamed(head.info.session_id.clone()));
        };
        let this = self.clone();
        let find = move || {
            let directory = this.resolve_directory(&head.tenant, &name)?;
            let not_committed = || {
                WorkspaceError::NotCommitted(format!(
                    "the workspace {name:?} was not committed at {point} of the session, or before; nothing was changed. \
                 With `workspaces.checkpoints: true` it is committed at each checkpoint"
                ))
            };
            // A lookup must not create a repository.
            if directory.join(".git").symlink_metadata().is_err() {
                return Err(not_committed());
            }
            let repo = this.open(&directory)?;
            let commit = repo.find(&CommitNote::new(&head, Some(seq), ""))?.ok_or_else(not_committed)?;
            // Checks that the current files can be saved, before the session is rewound.
            repo.read(this.limits, Some(repo.tree_of(commit)?))?;
            Ok(RestorePlan { workspaces: this, directory, head, commit })
        };
        self.blocking(find).await
    }
}

/// Returns the name of the workspace in a session's metadata.
fn workspace_name(metadata: &Map<String, Value>) -> Result<Option<&str>, WorkspaceError> {
    match metadata.get(METADATA_KEY) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(name)) => check_name(name).map(|()| Some(name.as_str())),
        Some(_) => Err(WorkspaceError::InvalidName("the workspace name must be a string, such as \"shop\"".into())),
    }
}

fn check_name(name: &str) -> Result<(), WorkspaceError> {
    let invalid = |reason: &str| {
        Err(WorkspaceError::InvalidName(format!(
            "the workspace {name} {reason}; name a directory such as \"shop\" or \"shop/web\"",
            name = excerpt(name)
        )))
    };
    let plain = |c: Component<'_>| matches!(c, Component::Normal(part) if !is_git(part.as_encoded_bytes()));
    match name {
        _ if name.is_empty() || name.len() > MAX_NAME => invalid("must have a name of 1 to 255 bytes"),
        _ if name.chars().any(char::is_control) => invalid("has a control character in its name"),
        _ if !Path::new(name).components().all(plain) => invalid("must be relative, without `..` and without `.git`"),
        _ => Ok(()),
    }
}

/// A workspace and the commit that it can be restored to.
#[derive(Debug)]
pub struct RestorePlan {
    workspaces: Arc<Workspaces>,
    directory: PathBuf,
    head: Head,
    commit: Oid,
}

/// Result of restoring a workspace.
#[derive(Debug)]
pub struct RestoredWorkspace {
    /// The commit that was restored.
    pub commit: String,
    /// The commit that saved the previous files. `None` if they were already committed.
    pub saved_commit: Option<String>,
}

impl RestorePlan {
    /// Commits the current files, then restores the workspace to the commit. `seq` is the end of the session's log
    /// after its rewind.
    pub async fn restore(self, seq: Seq) -> Result<RestoredWorkspace, WorkspaceError> {
        let workspaces = self.workspaces.clone();
        workspaces
            .blocking(move || {
                let repo = self.workspaces.open(&self.directory)?;
                let target = repo.tree_of(self.commit)?;
                // Includes ignored files that would be overwritten.
                let current = repo.read(self.workspaces.limits, Some(target))?;
                let saved = repo.commit(&CommitNote::new(&self.head, None, "before a rewind"), current)?;
                repo.write(current, target)?;
                repo.commit(&CommitNote::new(&self.head, Some(seq), format!("rewound to {}", self.commit)), target)?;
                Ok(RestoredWorkspace { commit: self.commit.to_string(), saved_commit: saved.map(|id| id.to_string()) })
            })
            .await
    }
}
