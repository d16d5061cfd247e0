//! The pure rules, by example: each fixture file is a case. A new case is a new file.

use std::path::PathBuf;
use tenure::{log::*, policy::*, rules::*, run::*, session::*, *};

fn fixtures(kind: &str) -> Vec<(PathBuf, String)> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(kind);
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().path()).collect();
    files.sort();
    assert!(files.len() > 5, "the fixtures are there");
    files.into_iter().map(|p| (p.clone(), std::fs::read_to_string(&p).unwrap())).collect()
}

/// The lines of a section, without indentation.
fn section<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let mut lines = text.lines().skip_while(|l| *l != format!("{name}:")).skip(1);
    let mut section = Vec::new();
    while let Some(line) = lines.next().and_then(|l| l.strip_prefix("  ")) {
        section.push(line);
    }
    section
}

fn setting<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(": "))
}

/// A distinct image for each letter, large enough to be stored as a blob.
fn picture(letter: &str) -> String {
    use base64::Engine;
    let png = base64::engine::general_purpose::STANDARD.encode(letter.repeat(2000));
    format!("data:image/png;base64,{png}")
}

fn parse_message_entry(line: &str) -> MessageEntry {
    let (replaces_instructions, line) = line.strip_prefix("lead ").map_or((false, line), |l| (true, l));
    let (tag, text) = line.split_once(": ").unwrap_or((line.trim_end_matches(':'), ""));
    let message = match tag.split_once(' ').unwrap_or((tag, "")) {
        ("raw", _) => Message::parse(text).unwrap(),
        ("system", _) => Message::system(text),
        ("user", _) => Message::user(text),
        ("assistant", _) => Message::assistant(text),
        ("tool", id) => Message::tool(id, text),
        ("calls", _) => {
            let call = |c: &str| {
                let (id, name) = c.split_once('=').unwrap();
                serde_json::json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}})
            };
            let calls: Vec<_> = text.split(' ').map(call).collect();
            Message::from_value(&serde_json::json!({"role": "assistant", "content": null, "tool_calls": calls}))
                .unwrap()
        }
        (tag, _) => {
            let (role, pictures) = tag.split_once('+').unwrap_or_else(|| panic!("{line}"));
            let mut parts = vec![serde_json::json!({"type": "text", "text": text})];
            for p in pictures.split('+') {
                parts.push(serde_json::json!({"type": "image_url", "image_url": {"url": picture(p)}}));
            }
            Message::from_value(&serde_json::json!({"role": role, "content": parts})).unwrap()
        }
    };
    MessageEntry { replaces_instructions, ..MessageEntry::from(message) }
}

fn session(message_entries: &[MessageEntry]) -> Session {
    let at = "2026-01-01T00:00:00Z".parse().unwrap();
    let entries = [Entry::created(SessionCreated::default())].into_iter();
    // Stored messages have their media detached.
    let stored = message_entries.iter().map(|p| MessageEntry { message: p.message.detach().0, ..p.clone() });
    let entries = entries.chain(stored.map(Entry::Message));
    let records = (1..).zip(entries).map(|(seq, entry)| Record { seq, at, entry });
    Session::replay(&Principal::default().key(&SessionId::new("s").unwrap()), records).unwrap()
}

/// The session as written by a client that sends lists: each answer comes from a run, and each
/// question replies to the last answer.
fn by_list_client(mut session: Session) -> Session {
    let run = RunId::generate();
    let mut answer = None;
    for stored in &mut session.messages {
        match stored.message.role() {
            Role::User => stored.replies_to = answer,
            Role::Assistant => (stored.run, answer) = (Some(run.clone()), Some(stored.seq)),
            _ => {}
        }
    }
    session
}

fn message_entries(text: &str, name: &str) -> Vec<MessageEntry> {
    section(text, name).into_iter().map(parse_message_entry).collect()
}

fn texts(messages: &[Message]) -> Vec<String> {
    messages.iter().map(|m| m.as_str().to_owned()).collect()
}

fn incoming(messages: &[Message], history: HistoryMode) -> IncomingRequest<'_> {
    IncomingRequest { messages, history, ..IncomingRequest::default() }
}

/// The session after a plan is applied.
fn after(stored: &Session, plan: &ReconcilePlan) -> Session {
    let retained = stored.messages[..plan.retained].iter();
    let retained = retained.map(|m| MessageEntry {
        replaces_instructions: m.replaces_instructions,
        run: m.run.clone(),
        ..MessageEntry::from(m.message.clone())
    });
    let after = session(&retained.chain(plan.message_entries(1)).collect::<Vec<_>>());
    let same = after.messages.iter().zip(&stored.messages[..plan.retained]).all(|(new, old)| new.seq == old.seq);
    assert!(same, "stored messages have the records that the plan names");
    after
}

#[test]
fn reconcile_fixtures() {
    for (path, text) in fixtures("reconcile") {
        let stored = session(&message_entries(&text, "stored"));
        let stored = if setting(&text, "client") == Some("list") { by_list_client(stored) } else { stored };
        let messages: Vec<Message> = message_entries(&text, "incoming").into_iter().map(|p| p.message).collect();
        let history_mode = match setting(&text, "history") {
            None | Some("auto") => HistoryMode::Auto,
            Some("full") => HistoryMode::Full,
            Some("append") => HistoryMode::Append,
            Some(other) => panic!("history {other}"),
        };
        let is_retry = setting(&text, "retry") == Some("yes");
        let has_waited = setting(&text, "waited") == Some("yes");
        let plan = reconcile(&stored, &IncomingRequest { is_retry, has_waited, ..incoming(&messages, history_mode) });
        let mut summary = format!(
            "keep {}, matched {}, spliced {}, rewound {}, ephemeral {}",
            plan.retained, plan.matched, plan.omitted, plan.rewound, plan.ephemeral
        );
        if !plan.orphans.is_empty() {
            summary += &format!(", orphans {}", plan.orphans.join(" "));
        }
        assert_eq!(Some(&*summary), setting(&text, "plan"), "{}: {plan:#?}", path.display());
        let appended: Vec<MessageEntry> =
            plan.message_entries(1).into_iter().map(|p| MessageEntry { replies_to: None, ..p }).collect();
        let detached = |message_entries: Vec<MessageEntry>| -> Vec<MessageEntry> {
            message_entries.into_iter().map(|p| MessageEntry { message: p.message.detach().0, ..p }).collect()
        };
        assert_eq!(detached(appended), detached(message_entries(&text, "append")), "{}", path.display());
        let shown = plan.overlay.history(&after(&stored, &plan), &Window::default());
        assert!(is_valid(&shown), "{}", path.display());
        let shown: Vec<Message> = shown.into_iter().map(|m| m.detach().0).collect();
        let want: Vec<Message> = message_entries(&text, "shown").into_iter().map(|p| p.message.detach().0).collect();
        assert_eq!(texts(&shown), texts(&want), "{}", path.display());
    }
}

#[test]
fn history_fixtures() {
    for (path, text) in fixtures("history") {
        let window = match setting(&text, "window").map(|w| w.split_once(' ').unwrap()) {
            None => Window::default(),
            Some(("turns", n)) => Window { max_turns: n.parse().ok(), max_tokens: None },
            Some(("tokens", n)) => Window { max_turns: None, max_tokens: n.parse().ok() },
            Some(other) => panic!("window {other:?}"),
        };
        let shown = history(&session(&message_entries(&text, "stored")), &window);
        let want: Vec<Message> = message_entries(&text, "shown").into_iter().map(|p| p.message).collect();
        assert_eq!(texts(&shown), texts(&want), "{}", path.display());
        assert!(is_valid(&shown), "{}", path.display());
    }
}

mod properties {
    use super::*;
    use proptest::prelude::*;

    /// Few words and few ids, so that messages often coincide.
    fn any_message() -> impl Strategy<Value = Message> {
        let word = prop::sample::select(vec!["a", "b", "c"]);
        let id = prop::sample::select(vec!["c1", "c2", "c3"]);
        prop_oneof![
            word.clone().prop_map(Message::user),
            word.clone().prop_map(Message::assistant),
            word.clone().prop_map(Message::system),
            (id.clone(), word).prop_map(|(id, w)| Message::tool(id, w)),
            prop::collection::vec(id, 1..3).prop_map(|ids| {
                let calls: Vec<String> = ids.iter().map(|id| format!("{id}=run")).collect();
                parse_message_entry(&format!("calls: {}", calls.join(" "))).message
            }),
        ]
    }

    fn any_message_entries(max: usize) -> impl Strategy<Value = Vec<MessageEntry>> {
        let entry = (any_message(), prop::bool::weighted(0.1));
        prop::collection::vec(
            entry.prop_map(|(message, replaces_instructions)| MessageEntry {
                replaces_instructions: replaces_instructions && message.role().is_instruction(),
                ..MessageEntry::from(message)
            }),
            0..max,
        )
    }

    fn any_mode() -> impl Strategy<Value = HistoryMode> {
        prop::sample::select(vec![HistoryMode::Auto, HistoryMode::Full, HistoryMode::Append])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(3000))]

        /// Invariant 6: every prompt is valid, whatever the log and the window.
        #[test]
        fn every_history_shown_to_a_model_is_valid(
            message_entries in any_message_entries(24),
            turns in prop::option::of(0usize..5),
            budget in prop::option::of(0usize..200),
        ) {
            let session = session(&message_entries);
            let shown = history(&session, &Window { max_turns: turns, max_tokens: budget });
            prop_assert!(is_valid(&shown), "{shown:?}");
            // Only placeholders are invented, and nothing is shown twice.
            let mut have: Vec<String> = texts(&session.messages.iter().map(|m| m.message.clone()).collect::<Vec<_>>());
            for text in texts(&shown).into_iter().filter(|t| !t.contains(NO_RESULT)) {
                let i = have.iter().position(|h| *h == text);
                prop_assert!(i.is_some(), "{text} was not said, or is shown twice");
                have.remove(i.unwrap());
            }
        }

        /// For any stored log and any request: the prompt is valid, and every message of the
        /// request is counted once.
        #[test]
        fn any_request_leads_to_a_valid_prompt_and_is_accounted_for(
            message_entries in any_message_entries(16),
            messages in prop::collection::vec(any_message(), 0..12),
            mode in any_mode(),
            is_retry in any::<bool>(),
            has_waited in any::<bool>(),
        ) {
            let stored = session(&message_entries);
            let plan = reconcile(&stored, &IncomingRequest { is_retry, has_waited, ..incoming(&messages, mode) });
            prop_assert!(plan.retained <= stored.messages.len());
            let system = messages.iter().take_while(|m| m.role().is_instruction()).count();
            let counted = plan.matched + plan.appended() + plan.ephemeral + plan.orphans.len();
            prop_assert_eq!(counted, messages.len() - system, "{:?}", plan);
            prop_assert!(is_valid(&plan.overlay.history(&after(&stored, &plan), &Window::default())));
            if mode == HistoryMode::Append || (mode == HistoryMode::Auto && has_waited && !is_retry) {
                prop_assert_eq!(plan.rewound, 0);
            }
        }

        /// A client that sends back what it received, followed by a new message, never loses or
        /// duplicates a tool turn.
        #[test]
        fn a_faithful_client_loses_nothing(mut message_entries in any_message_entries(20)) {
            message_entries.retain(|p| !p.message.role().is_instruction());
            message_entries.push(Message::assistant("the answer").into());
            let stored = session(&message_entries);
            let visible: Vec<Message> = stored.messages.iter().filter(|m| m.message.is_visible()).map(|m| m.message.clone()).collect();
            let messages = [visible, vec![Message::user("new")]].concat();
            let plan = reconcile(&stored, &incoming(&messages, HistoryMode::Auto));
            prop_assert_eq!(plan.retained, stored.messages.len());
            prop_assert_eq!(texts(&plan.append.iter().map(|p| p.message.clone()).collect::<Vec<_>>()), texts(&[Message::user("new")]));
        }

        /// Reconciling is idempotent: the same request again changes nothing.
        #[test]
        fn reconciling_again_changes_nothing(message_entries in any_message_entries(12), mut messages in prop::collection::vec(any_message(), 1..10)) {
            messages.retain(|m| m.is_visible());
            let stored = session(&message_entries);
            let full = incoming(&messages, HistoryMode::Full);
            let merged = after(&stored, &reconcile(&stored, &full));
            let second = reconcile(&merged, &full);
            prop_assert_eq!((second.append, second.matched), (vec![], messages.len()));
        }

        /// Detached media are restored byte for byte.
        #[test]
        fn media_come_back_byte_for_byte(bytes in prop::collection::vec(any::<u8>(), 0..4000), text in ".{0,40}") {
            use base64::Engine;
            let data = base64::engine::general_purpose::STANDARD.encode(&bytes);
            let url = format!("data:image/png;base64,{data}");
            let message = Message::from_value(&serde_json::json!({"role": "user", "content": [
                {"type": "text", "text": text},
                {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
                {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
            ]})).unwrap();
            let (stored, blobs) = message.detach();
            prop_assert_eq!(blobs.len(), if data.len() >= MIN_BLOB_TEXT { 2 } else { 0 });
            prop_assert!(stored.is_same(&message) && message.is_same(&stored));
            let back = stored.attach(|id| blobs.iter().find(|b| b.id == *id).map(|b| b.bytes.clone())).unwrap();
            prop_assert_eq!(back.as_str(), message.as_str());
        }
    }
}

#[test]
fn messages_keep_every_byte_and_bad_ones_are_refused() {
    let unusual =
        r#"{ "x_trace":1.10, "role" : "user","content":"\u00e9\u0000","n":12345678901234567890123,"z":null,"a":[ ] }"#;
    assert_eq!(Message::parse(unusual).unwrap().as_str(), unusual);
    assert_eq!(
        Message::parse("{\"role\":\"user\",\n\"content\":\"a\"}").unwrap().as_str(),
        r#"{"role":"user", "content":"a"}"#
    );
    let bad = [
        ("[]", "", "JSON object"),
        ("{\"role\":\"user\"}", "content", "needs content"),
        ("{\"role\":\"robot\",\"content\":\"x\"}", "role", "unknown role"),
        ("{\"role\":\"user\",\"content\":7}", "content", "string, a list"),
        ("{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}", "content[0].text", "needs a text"),
        ("{\"role\":\"user\",\"content\":\"\\ud800\"}", "content", "hex escape"),
        ("{\"role\":\"tool\",\"content\":\"x\"}", "tool_call_id", "name the call"),
        ("{\"role\":\"assistant\"}", "content", "content or tool_calls"),
        (
            "{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"\",\"function\":{\"name\":\"f\"}}]}",
            "tool_calls[0].id",
            "needs an id",
        ),
        ("{\"role\":\"user\",\"content\":\"x\"", "", "not a valid message"),
    ];
    for (text, param, reason) in bad {
        match Message::parse(text) {
            Err(Error::Invalid { param: p, message }) => {
                assert_eq!(p, param, "{text}");
                assert!(message.contains(reason), "{text}: {message}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
    let deep = format!("{{\"role\":\"user\",\"content\":\"x\",\"deep\":{}1{}}}", "[".repeat(200), "]".repeat(200));
    assert!(Message::parse(&deep).is_err());
}
