//! The parameters with which any process can resume a run.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The parameters of a run that are stored with its start, so that any process can resume it after a crash:
/// the name of its model, and the options of the model request. A run without them ends if its process dies
/// (D-043).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Resumable {
    /// The name of the model, by which the process that resumes the run finds it.
    pub model: String,
    /// The options of the model request, besides the conversation.
    #[serde(default)]
    pub options: Map<String, Value>,
}

impl Resumable {
    /// Creates the parameters of a run with a model and without options.
    pub fn new(model: impl Into<String>) -> Self {
        Self { model: model.into(), options: Map::new() }
    }

    /// Sets the options of the model request.
    pub fn with_options(mut self, options: Map<String, Value>) -> Self {
        self.options = options;
        self
    }

    /// Reads the parameters from the detail of a `run_started` entry. `None` means that the run cannot be
    /// resumed.
    pub(crate) fn from_detail(detail: &Map<String, Value>) -> Option<Self> {
        let model = detail.get(MODEL)?.as_str()?.to_owned();
        let options = detail.get(OPTIONS).and_then(Value::as_object).cloned().unwrap_or_default();
        Some(Self { model, options })
    }

    /// Writes the parameters to the detail of a `run_started` entry.
    pub(crate) fn add_to_detail(&self, detail: &mut Map<String, Value>) {
        detail.insert(MODEL.to_owned(), Value::from(self.model.as_str()));
        detail.insert(OPTIONS.to_owned(), Value::Object(self.options.clone()));
    }
}

/// Keys in the detail of a `run_started` entry.
const MODEL: &str = "model";
const OPTIONS: &str = "options";
/// Key in the detail of a `run_started` entry: the request had an idempotency key, so its answer must be
/// stored for a replay.
pub(crate) const KEYED: &str = "keyed";
