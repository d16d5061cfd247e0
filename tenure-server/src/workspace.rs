//! Workspaces: the directory that a session names is kept in git, at the session's checkpoints and at its end, and a rewind can bring it
//! back.
//!
//! What is in a workspace was written by an agent, its `.git` included. So nothing in it is run (no hook, no filter, no program of git),
//! no link is followed, and nothing outside of it is written.

mod repository;
mod tree;

use crate::config::Config;
use crate::error::{ApiError, ApiResult};
use crate::serve::App;
use anyhow::Context;
use axum::http::StatusCode;
use git2::Oid;
use jiff::Timestamp;
use repository::Repo;
use serde_json::{Map, Value};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tenure::excerpt;
use tenure::{Error, Head, Point, Principal, Seq, SessionId, Tenant, Tenure};

/// Where a session's metadata names its workspace.
pub const KEY: &str = "workspace";

/// Below the root: a file for each workspace that was ever held. No tenant's directory begins with a dot.
const LOCKS: &str = ".locks";

/// Nobody waits longer for a workspace.
const MAX_TIME: Duration = Duration::from_secs(60);

/// The longest name.
const MAX_NAME: usize = 255;

/// What can be wrong with a workspace.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// It can not be one.
    #[error("{0}")]
    Name(String),
    /// It was not kept at that point.
    #[error("{0}")]
    NotKept(String),
    /// Another session or another process is at it.
    #[error("the workspace is in use by another session; try again in a moment")]
    Busy,
    /// It is over a limit.
    #[error("the workspace is over its limit `{limit}` of {max}; leave out what need not be kept with a .gitignore")]
    TooLarge {
        /// The limit's name.
        limit: &'static str,
        /// What it is set to.
        max: u64,
    },
    /// Something else went wrong, such as a full disk.
    #[error("{0}")]
    Failed(String),
}

impl Trouble {
    fn at(path: &Path, e: impl std::fmt::Display) -> Self {
        Self::Failed(format!("workspace, {}: {e}", path.display()))
    }
}

impl From<git2::Error> for Trouble {
    fn from(e: git2::Error) -> Self {
        Self::Failed(format!("workspace, git: {}", e.message()))
    }
}

impl From<Trouble> for ApiError {
    fn from(trouble: Trouble) -> Self {
        let why = trouble.to_string();
        match trouble {
            Trouble::Name(_) => Self::invalid(format!("metadata.{KEY}"), why),
            Trouble::NotKept(_) => Self::new(StatusCode::CONFLICT, "workspace_not_kept", why).with_param(KEY),
            Trouble::Busy => Self::new(StatusCode::CONFLICT, "workspace_busy", why).with_param(KEY),
            Trouble::TooLarge { limit, .. } => Self::too_large(limit, why),
            Trouble::Failed(_) => {
                tracing::error!(why, "a workspace failed");
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "workspace_unavailable", why).with_param(KEY)
            }
        }
    }
}

/// What a commit is about.
struct Note {
    session: SessionId,
    /// When the session began: another may have had its name before.
    born: Timestamp,
    /// The record of the session that it belongs to; what is only put by before a rewind belongs to none.
    seq: Option<Seq>,
    what: String,
}

impl Note {
    fn new(head: &Head, seq: Option<Seq>, what: impl Into<String>) -> Self {
        let (session, born) = (head.info.session_id.clone(), head.info.created_at);
        Self { session, born, seq, what: what.into() }
    }
}

/// All workspaces.
#[derive(Debug)]
pub struct Workspaces {
    root: PathBuf,
    checkpoints: bool,
    limits: tree::Limits,
}

impl Workspaces {
    /// As the configuration says; `None` if there are to be none.
    pub fn new(config: &Config) -> anyhow::Result<Option<Arc<Self>>> {
        let config = &config.workspaces;
        if config.root.is_empty() {
            return Ok(None);
        }
        let open = || {
            std::fs::create_dir_all(Path::new(&config.root).join(LOCKS))
                .and_then(|()| std::fs::canonicalize(&config.root))
        };
        let root = open().with_context(|| format!("workspaces.root: can not use {}", config.root))?;
        let limits = tree::Limits { max_files: config.max_files, max_bytes: config.max_bytes };
        Ok(Some(Arc::new(Self { root, checkpoints: config.checkpoints, limits })))
    }

    /// Keeps workspaces when sessions end and, if that is wished, at their checkpoints.
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

    /// Where a workspace is. It must be there, inside of the tenant's own directory, whatever links say.
    fn place(&self, tenant: &Tenant, name: &str) -> Result<PathBuf, Trouble> {
        check_name(name)?;
        let home = self.root.join(crate::names::file_name(tenant.as_str()));
        let place = home.join(name);
        let found = place.canonicalize();
        let found = found.map_err(|e| {
            Trouble::Name(format!(
                "there is no directory {name:?} among the workspaces of {tenant}: {e}; make it first"
            ))
        })?;
        if !found.starts_with(&home) || found == home {
            return Err(Trouble::Name(format!("the workspace {name:?} leads out of the directory of {tenant}")));
        }
        match found.is_dir() {
            true => Ok(found),
            false => Err(Trouble::Name(format!("the workspace {name:?} is not a directory"))),
        }
    }

    fn open(&self, place: &Path) -> Result<Repo, Trouble> {
        let name = blake3::hash(place.as_os_str().as_encoded_bytes()).to_hex();
        Repo::open(place, &self.root.join(LOCKS).join(name.as_str()))
    }

    /// libgit2 and files make their thread wait. Where the root is is nobody's business.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Trouble> + Send + 'static,
    ) -> Result<T, Trouble> {
        let done = match tokio::time::timeout(MAX_TIME, tokio::task::spawn_blocking(work)).await {
            Ok(done) => done.unwrap_or_else(|e| Err(Trouble::Failed(format!("workspace: {e}")))),
            // It goes on by itself, and holds the workspace until it is done.
            Err(_) => Err(Trouble::Failed(format!("the workspace took longer than {} s", MAX_TIME.as_secs()))),
        };
        done.map_err(|e| match e {
            Trouble::Failed(why) => Trouble::Failed(why.replace(&format!("{}/", self.root.display()), "")),
            other => other,
        })
    }

    /// Commits a session's workspace, if it has one and something has changed.
    async fn keep(self: &Arc<Self>, head: &Head, seq: Seq, what: &str) -> Result<(), Trouble> {
        let name = match named(&head.info.metadata) {
            Ok(Some(name)) => name.to_owned(),
            Ok(None) => return Ok(()),
            // From before there were workspaces here: it never was one.
            Err(why) => {
                tracing::warn!(session_id = %head.info.session_id, %why, "a session names no workspace that could be kept");
                return Ok(());
            }
        };
        let (here, tenant, note) = (self.clone(), head.tenant.clone(), Note::new(head, Some(seq), what));
        self.blocking(move || {
            let repo = here.open(&here.place(&tenant, &name)?)?;
            let tree = repo.read(here.limits, None)?;
            repo.commit(&note, tree).map(drop)
        })
        .await
    }
}

/// The workspace that metadata names.
fn named(metadata: &Map<String, Value>) -> Result<Option<&str>, Trouble> {
    match metadata.get(KEY) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(name)) => check_name(name).map(|()| Some(name.as_str())),
        Some(_) => Err(Trouble::Name("a workspace is named by text, such as \"shop\"".into())),
    }
}

fn check_name(name: &str) -> Result<(), Trouble> {
    let wrong = |why: &str| {
        Err(Trouble::Name(format!(
            "the workspace {name} {why}; name a directory such as \"shop\" or \"shop/web\"",
            name = excerpt(name)
        )))
    };
    let plain = |c: Component<'_>| matches!(c, Component::Normal(part) if !tree::is_git(part.as_encoded_bytes()));
    match name {
        _ if name.is_empty() || name.len() > MAX_NAME => wrong("has no name, or one of more than 255 bytes"),
        _ if name.chars().any(char::is_control) => wrong("has a control character in its name"),
        _ if !Path::new(name).components().all(plain) => {
            wrong("must not be absolute, lead up, or be a part of a repository")
        }
        _ => Ok(()),
    }
}

/// A way back that was found.
#[derive(Debug)]
pub struct Way {
    here: Arc<Workspaces>,
    place: PathBuf,
    head: Head,
    to: Oid,
}

/// What was brought back.
#[derive(Debug)]
pub struct Restored {
    /// The commit that the workspace is like now.
    pub commit: String,
    /// The commit with what was there before, if it was not in any.
    pub saved: Option<String>,
}

impl Way {
    /// Puts by what is there, then makes the workspace what it was. `seq` is the session's end after its rewind.
    pub async fn go(self, seq: Seq) -> Result<Restored, Trouble> {
        let here = self.here.clone();
        here.blocking(move || {
            let repo = self.here.open(&self.place)?;
            let want = repo.tree_of(self.to)?;
            // Also what is ignored, where it would be written over.
            let have = repo.read(self.here.limits, Some(want))?;
            let saved = repo.commit(&Note::new(&self.head, None, "before a rewind"), have)?;
            repo.write(have, want)?;
            repo.commit(&Note::new(&self.head, Some(seq), format!("rewound to {}", self.to)), want)?;
            Ok(Restored { commit: self.to.to_string(), saved: saved.map(|id| id.to_string()) })
        })
        .await
    }
}

impl App {
    /// Whether metadata that a session is to have names a workspace that can be one.
    pub async fn check_workspace(&self, who: &Principal, metadata: &Map<String, Value>) -> ApiResult<()> {
        let Some(here) = &self.workspaces else { return Ok(()) };
        let Some(name) = named(metadata)?.map(str::to_owned) else { return Ok(()) };
        let (inner, tenant) = (here.clone(), who.tenant.clone());
        Ok(here.blocking(move || inner.place(&tenant, &name).map(drop)).await?)
    }

    /// The card of a session that is about to be deleted, if its workspace may have to be kept.
    pub async fn card_to_keep(&self, who: &Principal, id: &SessionId) -> Option<Head> {
        self.workspaces.as_ref()?;
        self.tenure.head(who, id).await.ok()
    }

    /// Keeps the workspace of a session that was deleted. It stays where it is, so a failure loses nothing.
    pub async fn keep_deleted(&self, head: Option<Head>) {
        if let (Some(here), Some(head)) = (&self.workspaces, head)
            && let Err(why) = here.keep(&head, head.seq, "the session was deleted").await
        {
            tracing::warn!(session_id = %head.info.session_id, %why, "the workspace of a deleted session could not be committed");
        }
    }

    /// Finds the way back for a workspace: the newest commit at or before a point of its session. Changes nothing.
    pub async fn way_back(&self, who: &Principal, id: &SessionId, to: &Point) -> ApiResult<Way> {
        let Some(here) = self.workspaces.clone() else {
            return Err(ApiError::invalid(
                KEY,
                "workspaces are not kept here; set `workspaces.root` in the configuration",
            ));
        };
        let (head, place) = self.tenure.view(who, id, |s| (s.head().clone(), s.locate(to))).await?;
        let Some(point) = place else {
            return Err(Error::NoSuchPoint { session_id: id.clone(), what: to.to_string() }.into());
        };
        let Some(name) = named(&head.info.metadata)?.map(str::to_owned) else {
            return Err(ApiError::invalid(KEY, format!("session {id} names no workspace; set `metadata.{KEY}` first")));
        };
        let (kept, what) = (here.clone(), to.to_string());
        let find = move || {
            let place = here.place(&head.tenant, &name)?;
            let not_kept = || {
                Trouble::NotKept(format!(
                    "the workspace {name:?} was not committed at {what} of the session, or before; nothing was changed. \
                 With `workspaces.checkpoints: true` it is committed at each checkpoint"
                ))
            };
            // Looking must not make a repository.
            if place.join(".git").symlink_metadata().is_err() {
                return Err(not_kept());
            }
            let repo = here.open(&place)?;
            let to = repo.find(&Note::new(&head, Some(point.seq), ""))?.ok_or_else(not_kept)?;
            // What can not be put by is found out before the session is rewound.
            repo.read(here.limits, Some(repo.tree_of(to)?))?;
            Ok(Way { here, place, head, to })
        };
        Ok(kept.blocking(find).await?)
    }
}
