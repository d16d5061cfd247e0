//! Questions of a model to a person: the arguments of the tool `ask_human`, and how a decision becomes its
//! result (D-133).

use crate::rules::session::Review;
use crate::types::entry::{Decision, ReviewDecided};
use crate::types::error::{Error, Result};
use crate::types::id::check_text;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Maximum size of a question or of a choice, in bytes.
const MAX_TEXT_BYTES: usize = 16 << 10;
/// Maximum number of choices.
const MAX_CHOICES: usize = 32;

/// The key of the question in the details of a review.
pub(crate) const QUESTION: &str = "question";
/// The key of the choices in the details of a review.
pub(crate) const CHOICES: &str = "choices";
/// The key of the chosen answer in the arguments of a decision.
pub(crate) const CHOICE: &str = "choice";
/// The key of a corrected answer in the arguments of a decision.
const ANSWER: &str = "answer";

/// A question to a person.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HumanQuestion {
    pub question: String,
    #[serde(default)]
    pub choices: Vec<String>,
    /// The queue of reviewers. `None` means that of the review rule.
    #[serde(default)]
    pub queue: Option<String>,
}

impl HumanQuestion {
    /// Reads the arguments of a call. The error is the result that the model receives.
    pub fn from_arguments(arguments: &Map<String, Value>) -> std::result::Result<Self, String> {
        let question: Self = serde_json::from_value(Value::Object(arguments.clone())).map_err(|e| e.to_string())?;
        let is_valid = |text: &String| !text.trim().is_empty() && text.len() <= MAX_TEXT_BYTES;
        if !is_valid(&question.question) || !question.choices.iter().all(is_valid) {
            return Err(format!("a question and its choices have 1 to {MAX_TEXT_BYTES} bytes"));
        }
        if question.choices.len() > MAX_CHOICES {
            return Err(format!("a question has at most {MAX_CHOICES} choices"));
        }
        question
            .queue
            .as_deref()
            .map_or(Ok(()), check_text)
            .map_err(|reason| format!("not a valid queue: {reason}"))?;
        Ok(question)
    }
}

impl Review {
    /// Returns the question of a review that is not about a tool call but asks something. `None` for any other
    /// review.
    pub fn question(&self) -> Option<&str> {
        self.opened.detail.get(QUESTION)?.as_str()
    }

    /// Returns the answers that the question offers. A reviewer may give another one.
    pub fn choices(&self) -> Vec<&str> {
        let choices = self.opened.detail.get(CHOICES).and_then(Value::as_array);
        choices.into_iter().flatten().filter_map(Value::as_str).collect()
    }

    /// Returns the answer that the reviewer chose.
    pub fn choice(&self) -> Option<&str> {
        self.decided.as_ref()?.1.arguments.as_ref()?.get(CHOICE)?.as_str()
    }

    /// Checks that a choice is one of the question, and that a corrected question has an answer.
    pub(crate) fn check_answer(
        &self,
        decision: Decision,
        choice: Option<&str>,
        arguments: Option<&Value>,
    ) -> Result<()> {
        let choices = self.choices();
        if let Some(choice) = choice
            && !choices.contains(&choice)
        {
            let message = match choices.as_slice() {
                [] => "this review has no choices; answer with `notes`".to_owned(),
                choices => format!("not one of the choices: {}", choices.join(", ")),
            };
            return Err(Error::invalid(CHOICE, message));
        }
        if choice.is_some() && arguments.is_some() {
            return Err(Error::invalid(CHOICE, "use `choice` or `arguments`, not both"));
        }
        let has_answer = arguments.is_some_and(|arguments| arguments[ANSWER].is_string());
        if self.question().is_some() && decision == Decision::Corrected && !has_answer {
            return Err(Error::invalid(
                "arguments.answer",
                "a corrected question needs `arguments`: {\"answer\": text}",
            ));
        }
        Ok(())
    }
}

/// Returns the result of a question: the decision, and the answer, which is the choice, the corrected answer, or
/// the notes.
pub(crate) fn answer_text(decided: &ReviewDecided) -> String {
    let given = |key: &str| decided.arguments.as_ref().and_then(|arguments| arguments.get(key)).cloned();
    let mut result = json!({"decision": decided.decision});
    let notes = decided.notes.clone().map(Value::String);
    match (given(CHOICE).or_else(|| given(ANSWER)), notes) {
        (Some(answer), notes) => {
            result["answer"] = answer;
            if let Some(notes) = notes {
                result["notes"] = notes;
            }
        }
        (None, Some(notes)) => result["answer"] = notes,
        (None, None) => {}
    }
    result.to_string()
}
