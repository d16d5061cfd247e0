//! Commits and restores the workspaces of all sessions.

use super::error::{METADATA_KEY, WorkspaceError};
use super::note::CommitNote;
use super::repository::SessionRepository;
use super::tree::{TreeLimits, is_git};
use crate::config::workspaces as config;
use crate::names::file_name;
use anyhow::Context;
use git2::Oid;
use serde_json::{Map, Value};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tenure::excerpt;
use tenure::{Head, Seq, Tenant, Tenure};

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
        let open = || {
            std::fs::create_dir_all(Path::new(&config.root).join(LOCKS))
                .and_then(|()| std::fs::canonicalize(&config.root))
        };
        let root = open().with_context(|| format!("workspaces.root: can not use {}", config.root))?;
        let limits = TreeLimits { max_files: config.max_files, max_bytes: config.max_bytes };
        Ok(Some(Arc::new(Self { root, checkpoints: config.checkpoints, limits })))
    }

    /// Registers hooks that commit workspaces when sessions end and, if `workspaces.checkpoints` is set, at
    /// checkpoints.
    pub fn install(self: Arc<Self>, tenure: &Tenure) {
        let here = self.clone();
        tenure.on_expire(move |session, _| {
            let here = here.clone();
            async move { here.keep(session.head(), session.seq, "the end of the session").await.map_err(|e| e.to_string()) }
        });
        if self.checkpoints {
            tenure.on_checkpoint(move |head, label, seq| {
                let here = self.clone();
                async move { here.keep(&head, seq, &format!("checkpoint {label}")).await.map_err(|e| e.to_string()) }
            });
        }
    }

    /// Resolves the path of a workspace. It must exist inside the tenant's own directory, after symbolic links are
    /// resolved.
    fn place(&self, tenant: &Tenant, name: &str) -> Result<PathBuf, WorkspaceError> {
        check_name(name)?;
        let home = self.root.join(file_name(tenant.as_str()));
        let place = home.join(name);
        let found = place.canonicalize();
        let found = found.map_err(|e| {
            WorkspaceError::Name(format!(
                "there is no directory {name:?} among the workspaces of {tenant}: {e}; make it first"
            ))
        })?;
        if !found.starts_with(&home) || found == home {
            return Err(WorkspaceError::Name(format!("the workspace {name:?} leads out of the directory of {tenant}")));
        }
        match found.is_dir() {
            true => Ok(found),
            false => Err(WorkspaceError::Name(format!("the workspace {name:?} is not a directory"))),
        }
    }

    fn open(&self, place: &Path) -> Result<SessionRepository, WorkspaceError> {
        let name = blake3::hash(place.as_os_str().as_encoded_bytes()).to_hex();
        SessionRepository::open(place, &self.root.join(LOCKS).join(name.as_str()))
    }

    /// Runs blocking work (libgit2, file system) on a blocking thread with a timeout. Removes the root's path from
    /// errors, because it must not be disclosed.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, WorkspaceError> + Send + 'static,
    ) -> Result<T, WorkspaceError> {
        let done = match tokio::time::timeout(MAX_TIME, tokio::task::spawn_blocking(work)).await {
            Ok(done) => done.unwrap_or_else(|e| Err(WorkspaceError::Failed(format!("workspace: {e}")))),
            // The work continues in the background, and holds the lock until it is done.
            Err(_) => Err(WorkspaceError::Failed(format!("the workspace took longer than {} s", MAX_TIME.as_secs()))),
        };
        done.map_err(|e| match e {
            WorkspaceError::Failed(why) => {
                WorkspaceError::Failed(why.replace(&format!("{}/", self.root.display()), ""))
            }
            other => other,
        })
    }

    /// Commits a session's workspace, if it has one and its files have changed.
    pub async fn keep(self: &Arc<Self>, head: &Head, seq: Seq, what: &str) -> Result<(), WorkspaceError> {
        let name = match named(&head.info.metadata) {
            Ok(Some(name)) => name.to_owned(),
            Ok(None) => return Ok(()),
            // The metadata predates the workspaces feature, so it never denoted a workspace.
            Err(why) => {
                tracing::warn!(session_id = %head.info.session_id, %why, "a session names no workspace that could be kept");
                return Ok(());
            }
        };
        let (here, tenant, note) = (self.clone(), head.tenant.clone(), CommitNote::new(head, Some(seq), what));
        self.blocking(move || {
            let repo = here.open(&here.place(&tenant, &name)?)?;
            let tree = repo.read(here.limits, None)?;
            repo.commit(&note, tree).map(drop)
        })
        .await
    }

    /// Checks that new metadata of a session names no workspace, or a valid and existing one (D-116).
    pub async fn check(self: &Arc<Self>, tenant: &Tenant, metadata: &Map<String, Value>) -> Result<(), WorkspaceError> {
        let Some(name) = named(metadata)?.map(str::to_owned) else { return Ok(()) };
        let (here, tenant) = (self.clone(), tenant.clone());
        self.blocking(move || here.place(&tenant, &name).map(drop)).await
    }

    /// Finds the newest commit at or before a record of a session; `what` describes that point in errors. Restores
    /// nothing.
    pub async fn find(self: &Arc<Self>, head: Head, seq: Seq, what: String) -> Result<RestorePlan, WorkspaceError> {
        let Some(name) = named(&head.info.metadata)?.map(str::to_owned) else {
            return Err(WorkspaceError::Unnamed(head.info.session_id.clone()));
        };
        let here = self.clone();
        let find = move || {
            let place = here.place(&head.tenant, &name)?;
            let not_kept = || {
                WorkspaceError::NotKept(format!(
                    "the workspace {name:?} was not committed at {what} of the session, or before; nothing was changed. \
                 With `workspaces.checkpoints: true` it is committed at each checkpoint"
                ))
            };
            // A lookup must not create a repository.
            if place.join(".git").symlink_metadata().is_err() {
                return Err(not_kept());
            }
            let repo = here.open(&place)?;
            let to = repo.find(&CommitNote::new(&head, Some(seq), ""))?.ok_or_else(not_kept)?;
            // Checks that the current files can be saved, before the session is rewound.
            repo.read(here.limits, Some(repo.tree_of(to)?))?;
            Ok(RestorePlan { here, place, head, to })
        };
        self.blocking(find).await
    }
}

/// Returns the name of the workspace in a session's metadata.
fn named(metadata: &Map<String, Value>) -> Result<Option<&str>, WorkspaceError> {
    match metadata.get(METADATA_KEY) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(name)) => check_name(name).map(|()| Some(name.as_str())),
        Some(_) => Err(WorkspaceError::Name("a workspace is named by text, such as \"shop\"".into())),
    }
}

fn check_name(name: &str) -> Result<(), WorkspaceError> {
    let wrong = |why: &str| {
        Err(WorkspaceError::Name(format!(
            "the workspace {name} {why}; name a directory such as \"shop\" or \"shop/web\"",
            name = excerpt(name)
        )))
    };
    let plain = |c: Component<'_>| matches!(c, Component::Normal(part) if !is_git(part.as_encoded_bytes()));
    match name {
        _ if name.is_empty() || name.len() > MAX_NAME => wrong("has no name, or one of more than 255 bytes"),
        _ if name.chars().any(char::is_control) => wrong("has a control character in its name"),
        _ if !Path::new(name).components().all(plain) => {
            wrong("must not be absolute, lead up, or be a part of a repository")
        }
        _ => Ok(()),
    }
}

/// A workspace and the commit that it can be restored to.
#[derive(Debug)]
pub struct RestorePlan {
    here: Arc<Workspaces>,
    place: PathBuf,
    head: Head,
    to: Oid,
}

/// Result of restoring a workspace.
#[derive(Debug)]
pub struct RestoredWorkspace {
    /// The commit that was restored.
    pub commit: String,
    /// The commit that saved the previous files. `None` if they were already committed.
    pub saved: Option<String>,
}

impl RestorePlan {
    /// Commits the current files, then restores the workspace to the commit. `seq` is the end of the session's log
    /// after its rewind.
    pub async fn restore(self, seq: Seq) -> Result<RestoredWorkspace, WorkspaceError> {
        let here = self.here.clone();
        here.blocking(move || {
            let repo = self.here.open(&self.place)?;
            let want = repo.tree_of(self.to)?;
            // Includes ignored files that would be overwritten.
            let have = repo.read(self.here.limits, Some(want))?;
            let saved = repo.commit(&CommitNote::new(&self.head, None, "before a rewind"), have)?;
            repo.write(have, want)?;
            repo.commit(&CommitNote::new(&self.head, Some(seq), format!("rewound to {}", self.to)), want)?;
            Ok(RestoredWorkspace { commit: self.to.to_string(), saved: saved.map(|id| id.to_string()) })
        })
        .await
    }
}
