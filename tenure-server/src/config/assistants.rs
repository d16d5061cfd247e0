//! Validation of `assistants` that is possible before a model is called.

use super::models::{ModelConfig, has_model};
use anyhow::bail;
use tenure::{Assistant, policy::CompactionPolicy};

/// Validates the assistants.
pub(super) fn check(assistants: &[Assistant], models: &[ModelConfig]) -> anyhow::Result<()> {
    for (i, assistant) in assistants.iter().enumerate() {
        if let Some(model) = assistant.model.as_ref().filter(|m| !has_model(models, m)) {
            bail!("assistants[{i}].model: there is no model {model:?} under `models`");
        }
        if let Some(compact) = &assistant.short_term.compact {
            check_summary_model(&format!("assistants[{i}].short_term.compact"), compact, models)?;
        }
    }
    Ok(())
}

/// Validates that the model that writes summaries is configured. `key_path` is the configuration path for the error.
pub(super) fn check_summary_model(
    key_path: &str,
    compact: &CompactionPolicy,
    models: &[ModelConfig],
) -> anyhow::Result<()> {
    match compact {
        CompactionPolicy::With(model) if !has_model(models, model) => {
            bail!("{key_path}: there is no model {model:?} under `models`; use a configured model, true or false")
        }
        _ => Ok(()),
    }
}

/// Validates that names of models and assistants are unique, because requests name both in the same field.
pub(super) fn check_names(assistants: &[Assistant], models: &[ModelConfig]) -> anyhow::Result<()> {
    let mut names: Vec<&str> = models.iter().map(|m| m.name.as_str()).collect();
    names.extend(assistants.iter().map(|a| a.name.as_str()));
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|w| w[0] == w[1]) {
        bail!("{:?} is the name of two models or assistants; names must be unique across both", pair[0]);
    }
    Ok(())
}
