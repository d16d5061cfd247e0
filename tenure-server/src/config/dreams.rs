//! The section `dreams`: when memories of sessions are promoted to their users (memory consolidation).

use serde::{Deserialize, Serialize};
use tenure::{memory::DreamRules, policy::HumanDuration};

/// Memory consolidation: the thresholds for promoting a session's memory to its user, and the interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Dreams {
    /// Interval between dreams. `never` means only on request.
    pub every: HumanDuration,
    /// Minimum number of recalls.
    pub recalls: usize,
    /// Minimum number of distinct questions.
    pub questions: usize,
    /// Minimum number of distinct days.
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
