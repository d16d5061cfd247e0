//! Chat: the prompt that the model gets and the messages that are stored, for everything that clients send (DESIGN
//! 4.1 and 4.2).

use crate::in_every_way;
use crate::support::*;
use serde_json::{Value, json};
use tenure_server::config::Config;

/// A session with a tool turn: question, call, result, answer. The client ran the tool itself.
async fn tool_turn(test: &TestServer, id: &str) {
    test.model
        .then(ModelResponse::ToolCalls(vec![("c1", "weather", r#"{"city":"Bern"}"#)]))
        .then(ModelResponse::Text("It rains."));
    let first = test.chat(json!({"session_id": id, "messages": [user("Weather in Bern?")]})).await;
    assert_eq!(first.message()["tool_calls"][0]["function"]["arguments"], r#"{"city":"Bern"}"#);
    assert_eq!(first.body["choices"][0]["finish_reason"], "tool_calls");
    let second = test.chat(json!({"session_id": id, "messages": [tool("c1", "rain")]})).await;
    assert_eq!(second.content(), "It rains.");
}

fn weather() -> Vec<Value> {
    vec![
        user("Weather in Bern?"),
        call("c1", "weather", r#"{"city":"Bern"}"#),
        tool("c1", "rain"),
        assistant("It rains."),
    ]
}

fn and(mut list: Vec<Value>, more: &[Value]) -> Vec<Value> {
    list.extend_from_slice(more);
    list
}

in_every_way! {
    /// With an unknown id, all messages are new.
    async fn an_unknown_id_creates_a_session(test: &mut TestServer) {
        let sent = [system("Be brief."), user("Hi"), assistant("Hello"), user("How are you?")];
        let reply = test.chat(json!({"session_id": "new", "messages": sent})).await;
        assert_eq!((reply.status, reply.content(), reply.session_id()), (200, "answer 1", "new".to_owned()));
        assert_eq!(reply.body["session_id"], "new");
        assert_eq!(reply.report(), [0, 0, 0, 3], "the system prompt is not counted");
        assert_eq!(test.model.last_messages(), sent);
        assert_eq!(test.stored("new").await, and(sent.to_vec(), &[assistant("answer 1")]));
    }

    /// The client sends only new messages; the server has the history.
    async fn only_new_messages(test: &mut TestServer) {
        test.chat(json!({"session_id": "s", "messages": [user("My name is Ada.")]})).await;
        let reply = test.chat(json!({"session_id": "s", "messages": [user("What is my name?")]})).await;
        assert_eq!(reply.report(), [0, 0, 0, 1]);
        let want = [user("My name is Ada."), assistant("answer 1"), user("What is my name?")];
        assert_eq!(test.model.last_messages(), want);
        assert_eq!(test.stored("s").await, and(want.to_vec(), &[assistant("answer 2")]));
        // From a client that sends only new messages, the same text twice is two turns.
        let reply = test.chat(json!({"session_id": "s", "messages": [user("What is my name?")]})).await;
        assert_eq!(reply.report(), [0, 0, 0, 1]);
        assert_eq!(test.stored("s").await.len(), 6);
    }

    /// The whole visible history plus a new message: the tool turns stay in place.
    async fn the_full_history(test: &mut TestServer) {
        tool_turn(test, "s").await;
        let sent = [user("Weather in Bern?"), assistant("It rains."), user("And Basel?")];
        let reply = test.chat(json!({"session_id": "s", "messages": sent})).await;
        assert_eq!(reply.report(), [2, 2, 0, 1]);
        assert_eq!(test.model.last_messages(), and(weather(), &[user("And Basel?")]));
        assert_eq!(test.stored("s").await, and(weather(), &[user("And Basel?"), assistant("answer 3")]));
    }

    /// The whole history with the client's own copy of the tool turns: matched, not duplicated.
    async fn an_own_copy_of_the_tool_turns(test: &mut TestServer) {
        tool_turn(test, "s").await;
        let mut sent = and(weather(), &[user("And Basel?")]);
        // Formatted differently, with fields added and removed.
        sent[1]["tool_calls"][0]["function"]["arguments"] = json!(r#"{ "city" : "Bern" }"#);
        sent[1].as_object_mut().unwrap().remove("content");
        sent[2]["name"] = json!("weather");
        let reply = test.chat(json!({"session_id": "s", "messages": sent})).await;
        assert_eq!(reply.report(), [4, 0, 0, 1]);
        assert_eq!(test.model.last_messages(), and(weather(), &[user("And Basel?")]), "ours are shown, as they were");
        assert_eq!(test.stored("s").await.len(), 6);
    }

    /// An edited earlier turn: what precedes it keeps its tool turns, what followed is rewound and stays readable.
    async fn an_edited_earlier_turn(test: &mut TestServer) {
        tool_turn(test, "s").await;
        let more = [user("Weather in Bern?"), assistant("It rains."), user("And Basel?")];
        test.chat(json!({"session_id": "s", "messages": more})).await;
        let edited = [user("Weather in Bern?"), assistant("It rains."), user("And Geneva?")];
        let reply = test.chat(json!({"session_id": "s", "messages": edited})).await;
        assert_eq!(reply.report(), [2, 2, 2, 1]);
        assert_eq!(test.model.last_messages(), and(weather(), &[user("And Geneva?")]));
        assert_eq!(test.stored("s").await, and(weather(), &[user("And Geneva?"), assistant("answer 4")]));
        let id = tenure::SessionId::new("s").unwrap();
        let discarded = test.app.tenure.discarded(&default_principal(), &id).await.unwrap();
        let discarded: Vec<Value> = discarded.iter().flat_map(|d| &d.messages).map(|m| m.message.to_value()).collect();
        assert_eq!(discarded, [user("And Basel?"), assistant("answer 3")]);
    }

    /// A changed system prompt takes effect immediately; history and tool turns stay.
    async fn a_changed_system_prompt(test: &mut TestServer) {
        test.model.then(ModelResponse::ToolCalls(vec![("c1", "weather", "{}")])).then(ModelResponse::Text("It rains."));
        test.chat(json!({"session_id": "s", "messages": [system("Be brief."), user("Weather?")]})).await;
        test.chat(json!({"session_id": "s", "messages": [tool("c1", "rain")]})).await;
        assert_eq!(test.model.last_messages()[0], system("Be brief."));
        let turn = [user("Weather?"), call("c1", "weather", "{}"), tool("c1", "rain"), assistant("It rains.")];
        // Sent with the whole history, and with only the new message.
        let sent = [system("Be long."), user("Weather?"), assistant("It rains."), user("Why?")];
        test.chat(json!({"session_id": "s", "messages": sent})).await;
        assert_eq!(test.model.last_messages(), and(and(vec![system("Be long.")], &turn), &[user("Why?")]));
        test.chat(json!({"session_id": "s", "history": "append", "messages": [system("In rhyme."), user("When?")]})).await;
        let shown = test.model.last_messages();
        assert_eq!((&shown[0], shown.len()), (&system("In rhyme."), 8));
        assert_eq!(shown.iter().filter(|m| m["role"] == "system").count(), 1);
        assert_eq!(test.session("s").await.head().digest.turns, 3, "no turn was lost");
    }

    /// The last user message again: the session is rewound to it and the answer is regenerated.
    async fn regenerate(test: &mut TestServer) {
        tool_turn(test, "s").await;
        test.model.then(ModelResponse::Text("It still rains."));
        let reply = test.chat(json!({"session_id": "s", "messages": [user("Weather in Bern?")]})).await;
        assert_eq!(reply.report(), [1, 0, 3, 0], "the only question");
        assert_eq!(test.model.last_messages(), [user("Weather in Bern?")], "the tools run again");
        assert_eq!(test.stored("s").await, [user("Weather in Bern?"), assistant("It still rains.")]);
        // With the preceding history, from a client that sends everything.
        let sent = [user("Weather in Bern?"), assistant("It still rains."), user("Why?")];
        test.chat(json!({"session_id": "s", "messages": sent})).await;
        let reply = test.chat(json!({"session_id": "s", "messages": sent})).await;
        assert_eq!(reply.report(), [3, 0, 1, 0]);
        assert_eq!(test.model.last_messages(), sent);
        assert_eq!(test.stored("s").await, and(sent.to_vec(), &[assistant("answer 5")]));
        // A single message is never treated as an edit, unless the request declares it the whole history.
        let reply = test.chat(json!({"session_id": "s", "messages": [user("Weather in Bern?")]})).await;
        assert_eq!(reply.report(), [0, 0, 0, 1]);
        let reply = test.chat(json!({"session_id": "s", "history": "full", "messages": [user("Weather in Bern?")]})).await;
        assert_eq!(reply.report(), [1, 0, 5, 0]);
    }

    /// Only tool results: they answer the open calls.
    async fn only_tool_results(test: &mut TestServer) {
        test.model.then(ModelResponse::ToolCalls(vec![("a", "f", r#"{"x":1}"#), ("b", "g", "{}")]));
        test.chat(json!({"session_id": "s", "messages": [user("Go")]})).await;
        // In a different order than the calls, with a result for an unknown call.
        let reply = test.chat(json!({"session_id": "s", "messages": [tool("b", "2"), tool("zzz", "?"), tool("a", "1")]})).await;
        assert_eq!(reply.report(), [0, 0, 0, 2]);
        assert_eq!(reply.body["session"]["orphans"], json!(["zzz"]));
        let calls = json!([
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": r#"{"x":1}"#}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ]);
        let tool_call_message = json!({"role": "assistant", "content": null, "tool_calls": calls});
        assert_eq!(test.model.last_messages(), [user("Go"), tool_call_message.clone(), tool("a", "1"), tool("b", "2")], "in the calls' order");
        assert_eq!(test.stored("s").await, [user("Go"), tool_call_message, tool("b", "2"), tool("a", "1"), assistant("answer 2")]);
        // Sent again: matched, and the answer is regenerated.
        let reply = test.chat(json!({"session_id": "s", "messages": [tool("b", "2"), tool("a", "1")]})).await;
        assert_eq!(reply.report(), [2, 0, 1, 0]);
        assert_eq!(test.stored("s").await.len(), 5);
    }

    /// Client-run tools with the whole history: the calls are sent back with their results.
    async fn client_tools_with_the_full_history(test: &mut TestServer) {
        test.model.then(ModelResponse::ToolCalls(vec![("c1", "weather", r#"{"city":"Bern"}"#)])).then(ModelResponse::Text("It rains."));
        let first = test.chat(json!({"messages": [user("Weather in Bern?")]})).await;
        let sent = [user("Weather in Bern?"), first.message().clone(), tool("c1", "rain")];
        let id = first.session_id();
        let reply = test.chat(json!({"session_id": id, "messages": sent})).await;
        assert_eq!((reply.content(), reply.report()), ("It rains.", [2, 0, 0, 1]));
        assert_eq!(test.model.last_messages(), weather()[..3]);
        let sent = and(weather(), &[user("Thanks")]);
        let reply = test.chat(json!({"session_id": id, "messages": sent})).await;
        assert_eq!(reply.report(), [4, 0, 0, 1]);
        assert_eq!(test.stored(&id).await, and(sent, &[assistant("answer 3")]));
    }

    /// A call without a result: the model sees a marked placeholder, which is not stored.
    async fn a_call_without_a_result(test: &mut TestServer) {
        test.model.then(ModelResponse::ToolCalls(vec![("c1", "weather", "{}")]));
        test.chat(json!({"session_id": "s", "messages": [user("Weather?")]})).await;
        test.chat(json!({"session_id": "s", "messages": [user("Never mind.")]})).await;
        let want = [user("Weather?"), call("c1", "weather", "{}"), tool("c1", tenure::rules::NO_RESULT), user("Never mind.")];
        assert_eq!(test.model.last_messages(), want);
        let stored = [user("Weather?"), call("c1", "weather", "{}"), user("Never mind."), assistant("answer 2")];
        assert_eq!(test.stored("s").await, stored);
    }

    /// An earlier turn without its images matches, and they are re-attached; a new image is added.
    async fn pictures(test: &mut TestServer) {
        let (first, second) = (image_message("What is this?", "7").to_value(), image_message("And this?", "8").to_value());
        test.chat(json!({"session_id": "s", "messages": [first]})).await;
        assert_eq!(test.model.last_messages(), std::slice::from_ref(&first));
        let reply = test.chat(json!({"session_id": "s", "messages": [user("What is this?"), assistant("answer 1"), user("Sure?")]})).await;
        assert_eq!(reply.report(), [2, 0, 0, 1]);
        let want = [first.clone(), assistant("answer 1"), user("Sure?")];
        assert_eq!(test.model.last_messages(), want, "byte for byte, in the message it came with");
        test.chat(json!({"session_id": "s", "messages": [user("What is this?"), assistant("answer 1"), user("Sure?"), assistant("answer 2"), second]})).await;
        let want = and(want.to_vec(), &[assistant("answer 2"), second]);
        assert_eq!(test.model.last_messages(), want, "a new picture is added, not swapped in");
        assert_eq!(test.stored("s").await, and(want, &[assistant("answer 3")]));
    }

    /// Without an id, the session is found by content: the one with the longest matching conversation.
    async fn found_by_content(test: &mut TestServer) {
        let first = test.chat(json!({"messages": [user("Hi")]})).await;
        let id = first.session_id();
        let again = test.chat(json!({"messages": [user("Hi"), assistant("answer 1"), user("More")]})).await;
        assert_eq!((again.session_id(), again.report()), (id.clone(), [2, 0, 0, 1]));
        // A second conversation that begins the same way and is shorter.
        test.model.then(ModelResponse::Text("answer 1"));
        let other = test.chat(json!({"messages": [user("Hi")]})).await.session_id();
        assert_ne!(other, id);
        let sent = [user("Hi"), assistant("answer 1"), user("More"), assistant("answer 2"), user("Last")];
        let reply = test.chat(json!({"messages": sent})).await;
        assert_eq!((reply.session_id(), reply.report()), (id.clone(), [4, 0, 0, 1]), "the longest match wins");
        // A conversation that matches no session.
        let reply = test.chat(json!({"messages": [user("Ho"), assistant("answer 1"), user("More")]})).await;
        assert!(![&id, &other].contains(&&reply.session_id()));
        // Another user with the same messages.
        let sent = json!({"messages": sent});
        let reply = test.client.chat(test.stream, sent, &[("x-tenure-user", "mallory")]).await;
        assert_eq!((reply.report(), test.model.last_messages().len()), ([0, 0, 0, 5], 5));
        assert!(![&id, &other].contains(&&reply.session_id()), "never across users");
    }

    /// The header names the session too; the body takes precedence.
    async fn found_by_header(test: &mut TestServer) {
        let body = json!({"messages": [user("Hi")]});
        let reply = test.client.chat(test.stream, body, &[("x-session-id", "h")]).await;
        assert_eq!((reply.session_id(), reply.body["session_id"].as_str()), ("h".to_owned(), Some("h")));
        let body = json!({"session_id": "b", "messages": [user("Hi")]});
        let reply = test.client.chat(test.stream, body, &[("x-session-id", "h")]).await;
        assert_eq!(reply.session_id(), "b");
        assert_eq!(test.stored("h").await.len(), 2);
    }

    /// `history` overrides the automatic detection.
    async fn history_modes(test: &mut TestServer) {
        test.chat(json!({"session_id": "s", "messages": [user("Hi")]})).await;
        let reply = test.chat(json!({"session_id": "s", "history": "append", "messages": [user("Hi")]})).await;
        assert_eq!(reply.report(), [0, 0, 0, 1]);
        assert_eq!(test.model.last_messages(), [user("Hi"), assistant("answer 1"), user("Hi")]);
        let reply = test.chat(json!({"session_id": "s", "history": "full", "messages": [user("Ho")]})).await;
        assert_eq!(reply.report(), [0, 0, 4, 1]);
        assert_eq!(test.model.last_messages(), [user("Ho")]);
        let reply = test.chat(json!({"session_id": "s", "history": "some", "messages": [user("Ho")]})).await;
        assert_eq!((reply.status, reply.body["error"]["param"].as_str()), (400, Some("history")));
        assert_eq!(test.stored("s").await.len(), 2);
    }

    /// `store: false`: nothing is stored, and an existing session is only read.
    async fn nothing_is_stored_if_the_client_asks_for_it(test: &mut TestServer) {
        let reply = test.chat(json!({"store": false, "messages": [user("Psst")]})).await;
        let response = if test.stream { reply.events.join("") } else { reply.text.clone() };
        assert!(response.contains("answer") && reply.headers.get("x-session-id").is_none(), "{reply:?}");
        assert_eq!(test.sessions().await, 0);
        test.chat(json!({"session_id": "s", "messages": [user("Hi")]})).await;
        let before = test.session("s").await;
        test.chat(json!({"session_id": "s", "store": false, "messages": [user("Psst")]})).await;
        assert_eq!(test.model.last_messages(), [user("Hi"), assistant("answer 2"), user("Psst")], "it sees the session");
        assert_eq!(test.session("s").await, before);
        assert!(!test.model.bodies().iter().any(|b| b.contains("\"store\"")));
    }

    /// Token usage is passed on, also in a stream that asks for it.
    async fn usage(test: &mut TestServer) {
        let reply = test.chat(json!({"stream_options": {"include_usage": true}, "messages": [user("Hi")]})).await;
        assert_eq!(reply.body["usage"], json!({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}));
        assert!(!test.stream || reply.is_done());
    }

    /// Invalid requests are reported and change nothing.
    async fn bad_requests_change_nothing(test: &mut TestServer) {
        let long = "x".repeat(200);
        for (bad, param) in [
            (json!({}), "messages"),
            (json!({"messages": []}), "messages"),
            (json!({"messages": "Hi"}), "messages"),
            (json!({"messages": [{"role": "nobody", "content": "x"}]}), "messages[0].role"),
            (json!({"messages": [user("a"), {"content": "x"}]}), "messages[1]"),
            (json!({"messages": [user("a")], "session_id": ""}), "session_id"),
            (json!({"messages": [user("a")], "session_id": "a\nb"}), "session_id"),
            (json!({"messages": [user("a")], "session_id": long}), "session_id"),
            (json!({"messages": [user("a")], "session_id": 7}), "session_id"),
            (json!({"messages": [user("a")], "on_busy": "panic"}), "on_busy"),
            (json!({"messages": [user("a")], "store": "no"}), "store"),
            (json!({"messages": [user("a")], "user": ""}), "user"),
        ] {
            let reply = test.chat(bad.clone()).await;
            assert_eq!((reply.status, reply.code()), (400, "invalid"), "{bad}: {reply:?}");
            let error_param = reply.body["error"]["param"].as_str().unwrap_or_default();
            assert!(error_param.contains(param) || param == "session_id" && error_param == "session", "{bad}: {reply:?}");
        }
        assert_eq!((test.sessions().await, test.model.request_count()), (0, 0));
    }
}

/// Unknown fields reach the model server byte for byte: order, spelling, numbers, spaces.
#[tokio::test(flavor = "multi_thread")]
async fn unknown_fields_are_passed_on_untouched() {
    let test = TestServer::new(StoreKind::Memory, false).await.unwrap();
    let body = r#"{"z_first": {"b":1.50,  "a":[1e2, "\u00e9"]}, "model":"default","session_id":"s","messages":[{"role":"user","content":"Hi","odd":1.0}],
        "temperature":0.70,"history":"auto","on_busy":"queue","logit_bias":{"50256":-100},"seed":12345678901234567890,"tools":[ ],"last":null}"#;
    let reply = reply(test.client.post_text(body, &[]).send().await.unwrap()).await;
    assert_eq!(reply.status, 200);
    let want = r#"{"z_first":{"b":1.50,  "a":[1e2, "\u00e9"]},"model":"default","messages":[{"role":"user","content":"Hi","odd":1.0}],"temperature":0.70,"logit_bias":{"50256":-100},"seed":12345678901234567890,"tools":[ ],"last":null}"#;
    assert_eq!(test.model.bodies(), [want]);
}

/// Several models by name, with the upstream name and key of each.
#[tokio::test(flavor = "multi_thread")]
async fn models_are_selected_by_name() {
    let (big, small) = (ScriptedModelServer::default(), ScriptedModelServer::default());
    let (one, two) = (big.start().await, small.start().await);
    let change = |config: &mut Config| {
        config.models = vec![model("big", &one), model("small", &two)];
        config.models[1].model = Some("small-2026".into());
        config.models[1].api_key = Some("sk-1".into());
    };
    let test = TestServer::with(StoreKind::Memory, false, change).await.unwrap();
    let ask =
        async |model: Value| test.chat(json!({"session_id": "s", "model": model, "messages": [user("Hi")]})).await;
    assert_eq!(ask(json!("big")).await.status, 200);
    assert_eq!(ask(json!("small")).await.status, 200);
    assert_eq!((big.request_count(), small.request_count()), (1, 1));
    assert!(big.headers(0).get("authorization").is_none());
    assert_eq!(small.headers(0)["authorization"], "Bearer sk-1");
    let name = |script: &ScriptedModelServer| {
        serde_json::from_str::<Value>(&script.bodies().pop().unwrap()).unwrap()["model"].clone()
    };
    assert_eq!((name(&big), name(&small)), (json!("big"), json!("small-2026")));
    // Without a model name: the session's model, else the first.
    assert_eq!(ask(Value::Null).await.status, 200);
    assert_eq!((big.request_count(), small.request_count()), (1, 2));
    test.chat(json!({"session_id": "other", "messages": [user("Hi")]})).await;
    assert_eq!((big.request_count(), small.request_count()), (2, 2));
    let reply = ask(json!("huge")).await;
    assert_eq!((reply.status, reply.code()), (404, "model_not_found"));
    assert!(reply.text.contains("configured models: big, small (GET"), "{}", reply.text);
    // The built-in model is always available, and listed only if no other is.
    assert!(ask(json!("rehearsal")).await.content().contains("I see"));
}

/// Of several choices all are passed on, and the first is stored.
#[tokio::test(flavor = "multi_thread")]
async fn several_choices() {
    let test = TestServer::new(StoreKind::Memory, false).await.unwrap();
    let reply = test.chat(json!({"session_id": "s", "n": 3, "messages": [user("Hi")]})).await;
    assert_eq!(reply.body["choices"].as_array().unwrap().len(), 3);
    assert_eq!(test.stored("s").await, [user("Hi"), assistant("answer 1")]);
}

fn assistants(config: &mut Config) {
    let poet =
        json!({"name": "poet", "instructions": "Rhyme.", "model": "default", "short_term": {"max_history_turns": 1}});
    config.assistants = vec![serde_json::from_value(poet).unwrap()];
}

/// An assistant as the model, or by `assistant_id`: its instructions come first, and its window applies.
#[tokio::test(flavor = "multi_thread")]
async fn instructions_of_the_assistant_come_first() {
    for (stream, ask) in
        [(false, json!({"model": "poet"})), (true, json!({"assistant_id": "poet", "model": "default"}))]
    {
        let test = TestServer::with(StoreKind::Sqlite, stream, assistants).await.unwrap();
        let send = async |text: &str, mut more: Value| {
            (more["session_id"], more["messages"]) = (json!("s"), json!([system("Be brief."), user(text)]));
            test.chat(more).await
        };
        send("One", ask).await;
        assert_eq!(test.model.last_messages(), [system("Rhyme."), system("Be brief."), user("One")]);
        assert!(test.model.bodies()[0].contains(r#""model":"default""#));
        assert!(!test.model.bodies()[0].contains("assistant_id"));
        // The session stays with its assistant.
        send("Two", json!({})).await;
        assert_eq!(
            test.model.last_messages(),
            [system("Rhyme."), system("Be brief."), user("Two")],
            "one turn is shown"
        );
        assert_eq!(test.stored("s").await.len(), 5, "all are kept, and the instructions are not among them");
        assert_eq!(test.session("s").await.head().assistant.as_deref(), Some("poet"));
        send("Psst", json!({"store": false})).await;
        assert_eq!(test.model.last_messages(), [system("Rhyme."), system("Be brief."), user("Psst")]);
        let reply = send("One", json!({"assistant_id": "painter"})).await;
        assert_eq!((reply.status, reply.code()), (404, "not_found"));
        test.chat(json!({"store": false, "assistant_id": "poet", "messages": [user("Psst")]})).await;
        assert_eq!(test.model.last_messages(), [system("Rhyme."), user("Psst")]);
    }
}

/// Without content matching, a request without an id creates a new session.
#[tokio::test(flavor = "multi_thread")]
async fn content_matching_can_be_off() {
    let test = TestServer::with(StoreKind::Memory, false, |c| c.sessions.content_matching = false).await.unwrap();
    let id = test.chat(json!({"messages": [user("Hi")]})).await.session_id();
    let sent = [user("Hi"), assistant("answer 1"), user("More")];
    assert_ne!(test.chat(json!({"messages": sent})).await.session_id(), id);
}

/// Errors name the limit that was exceeded.
#[tokio::test(flavor = "multi_thread")]
async fn limits() {
    let change = |config: &mut Config| {
        config.limits.max_body_bytes = 2000;
        config.limits.max_messages = 3;
        config.limits.max_message_bytes = 500;
    };
    let test = TestServer::with(StoreKind::Memory, false, change).await.unwrap();
    let long = [user(&"x".repeat(600))];
    let over = [long.to_vec(), vec![user("x"); 4], vec![user(&"x".repeat(3000))]];
    for (messages, limit) in over.iter().zip(["max_message_bytes", "max_messages", "max_body_bytes"]) {
        for store in [true, false] {
            let reply = test.chat(json!({"store": store, "messages": messages})).await;
            assert_eq!(
                (reply.status, reply.code(), reply.body["error"]["param"].as_str()),
                (413, "too_large", Some(limit))
            );
        }
    }
    assert_eq!((test.sessions().await, test.model.request_count()), (0, 0));
}

/// Unreadable headers are refused, not ignored: a session would be lost, or a request executed twice.
#[tokio::test(flavor = "multi_thread")]
async fn headers_are_text() {
    let test = TestServer::new(StoreKind::Memory, false).await.unwrap();
    for name in ["x-session-id", "idempotency-key"] {
        let value = reqwest::header::HeaderValue::from_bytes(b"\xfcber").unwrap();
        let request = test.client.post(false, json!({"messages": [user("Hi")]}), &[]).header(name, value);
        let reply = reply(request.send().await.unwrap()).await;
        assert_eq!((reply.status, reply.code()), (400, "invalid"));
    }
    assert_eq!(test.sessions().await, 0);
}
