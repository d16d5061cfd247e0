//! The section `dreams`: when memories of sessions are promoted to their users (memory consolidation).

use serde::{Deserialize, Serialize};
use tenure::{DreamRules, HumanDuration};

/// When sessions' memories become their users', and how often that is looked at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Dreams {
    /// How often; `never`: only when somebody asks for it.
    pub every: HumanDuration,
    /// Recalled at least so often,
    pub recalls: usize,
    /// for so many different questions,
    pub questions: usize,
    /// on so many different days.
    pub days: usize,
}

impl Default for Dreams {
    fn default() -> Self {
        let DreamRules { recalls, questions, days } = DreamRules::default();
        Self { every: HumanDuration::NEVER, recalls, questions, days }
    }
}

impl Dreams {
    /// The thresholds for promoting a memory.
    pub fn rules(&self) -> DreamRules {
        DreamRules { recalls: self.recalls, questions: self.questions, days: self.days }
    }
}
