//! The section `schedules`: runs of assistants that are started by cron expressions.

use super::cron::Cron;
use anyhow::{Context, bail};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tenure::{Assistant, Principal, SessionId, Tenant, User, session::AccessScope};

/// A schedule, as it is configured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Its name.
    pub name: String,
    /// The start times as a cron expression: minute, hour, day, month, day of the week.
    pub cron: String,
    /// The time zone of the cron expression.
    #[serde(default = "utc")]
    pub timezone: String,
    /// The assistant that is run.
    pub assistant: String,
    /// The text that is sent. Placeholders: `{{date}}`, `{{time}}`, `{{weekday}}`, `{{now}}`, `{{name}}`, `{{count}}`, and those of
    /// `variables`.
    pub input: String,
    /// Additional placeholders and their values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub variables: BTreeMap<String, String>,
    /// The session of all runs. `None` means a new session for each run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// The tenant.
    #[serde(default = "default_name")]
    pub tenant: String,
    /// The user that runs act as.
    #[serde(default = "default_name")]
    pub user: String,
}

fn utc() -> String {
    "UTC".to_owned()
}

fn default_name() -> String {
    "default".to_owned()
}

/// A parsed and validated schedule.
#[derive(Clone, Debug)]
pub struct CompiledSchedule {
    /// The schedule as configured.
    pub schedule: Schedule,
    cron: Cron,
    zone: TimeZone,
    /// The principal that its runs act as.
    pub principal: Principal,
    /// The session of all its runs. `None` means a new session for each run.
    pub session: Option<SessionId>,
}

/// Parses and validates the schedules of a configuration. An error names the path of the invalid setting.
pub fn compile(schedules: &[Schedule], assistants: &[Assistant]) -> anyhow::Result<Vec<CompiledSchedule>> {
    let mut all: Vec<CompiledSchedule> = Vec::new();
    for (i, schedule) in schedules.iter().enumerate() {
        let compiled = compile_one(schedule, assistants).with_context(|| format!("schedules[{i}]"))?;
        let is_same = |other: &CompiledSchedule| {
            other.schedule.name == schedule.name && other.principal.tenant == compiled.principal.tenant
        };
        if all.iter().any(is_same) {
            bail!("schedules[{i}].name: {:?} is used twice; names must be unique per tenant", schedule.name);
        }
        all.push(compiled);
    }
    Ok(all)
}

fn compile_one(schedule: &Schedule, assistants: &[Assistant]) -> anyhow::Result<CompiledSchedule> {
    if !assistants.iter().any(|a| a.name == schedule.assistant) {
        bail!("assistant: there is no assistant {:?} in this configuration", schedule.assistant);
    }
    let cron = schedule.cron.parse().context("cron")?;
    let zone = TimeZone::get(&schedule.timezone)
        .with_context(|| format!("timezone: unknown time zone {:?}", schedule.timezone))?;
    let principal = Principal {
        tenant: Tenant::new(&schedule.tenant)?,
        user: User::new(&schedule.user)?,
        scope: AccessScope::Own,
        quota: None,
    };
    let session = schedule.session.as_ref().map(SessionId::new).transpose().context("session")?;
    SessionId::new(&schedule.name).context("name")?;
    let compiled = CompiledSchedule { schedule: schedule.clone(), cron, zone, principal, session };
    compiled.input_at(Timestamp::UNIX_EPOCH, 0).context("input")?;
    Ok(compiled)
}

impl CompiledSchedule {
    /// Returns the next due time after `after`.
    pub fn next(&self, after: Timestamp) -> Option<Timestamp> {
        self.cron.next(&after.to_zoned(self.zone.clone())).map(|t| t.timestamp())
    }

    /// Renders the input of the run that is due at `at`, with its variables replaced. `count` is the number of the
    /// run.
    pub fn input_at(&self, at: Timestamp, count: u64) -> anyhow::Result<String> {
        let local_time = at.to_zoned(self.zone.clone());
        let mut input = String::new();
        let mut rest = self.schedule.input.as_str();
        while let Some((before, after)) = rest.split_once("{{") {
            let (name, after) = after.split_once("}}").context("`{{` without `}}`")?;
            let value = match name.trim() {
                "date" => local_time.date().to_string(),
                "time" => local_time.strftime("%H:%M").to_string(),
                "weekday" => local_time.strftime("%A").to_string(),
                "now" => at.to_string(),
                "name" => self.schedule.name.clone(),
                "count" => count.to_string(),
                other => match self.schedule.variables.get(other) {
                    Some(value) => value.clone(),
                    None => bail!("unknown variable {other:?}"),
                },
            };
            input.push_str(before);
            input.push_str(&value);
            rest = after;
        }
        input.push_str(rest);
        Ok(input)
    }
}
