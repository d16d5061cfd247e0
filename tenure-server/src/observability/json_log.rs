//! The JSON format of logs: one object per line, with the fields of the event and of its spans on one level.

use crate::clock;
use serde_json::{Map, Value};
use std::fmt;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

/// Formats an event as a flat JSON object. A field of the event replaces one of a span with the same name, and a field
/// of an inner span one of an outer span.
pub struct FlatJson;

impl<S: Subscriber + for<'a> LookupSpan<'a>> FormatEvent<S, JsonFields> for FlatJson {
    fn format_event(
        &self,
        context: &FmtContext<'_, S, JsonFields>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = Map::new();
        line.insert("timestamp".to_owned(), clock::now().to_string().into());
        line.insert("level".to_owned(), event.metadata().level().as_str().into());
        for span in context.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
            let extensions = span.extensions();
            let fields = extensions.get::<FormattedFields<JsonFields>>();
            let fields = fields.and_then(|text| serde_json::from_str::<Map<String, Value>>(text).ok());
            line.extend(fields.into_iter().flatten());
        }
        event.record(&mut FieldMap(&mut line));
        writeln!(writer, "{}", Value::Object(line))
    }
}

/// Collects the fields of an event.
struct FieldMap<'a>(&'a mut Map<String, Value>);

impl FieldMap<'_> {
    fn insert(&mut self, field: &Field, value: Value) {
        let name = field.name();
        self.0.insert(name.strip_prefix("r#").unwrap_or(name).to_owned(), value);
    }
}

impl Visit for FieldMap<'_> {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.insert(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.insert(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.insert(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.insert(field, value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.insert(field, value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.insert(field, format!("{value:?}").into());
    }
}
