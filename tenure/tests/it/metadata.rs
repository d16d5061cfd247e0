//! Session metadata in runs: templates in instructions, the context of tools, and the tool `metadata`.

use crate::on_every_store;
use crate::support::*;
use async_trait::async_trait;
use serde_json::{Map, Value, json};
use std::sync::Mutex;
use tenure::{log::*, policy::*, run::*, session::*, *};

fn map(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

async fn create_with(t: &Tenure, metadata: Value) {
    let new = NewSession { assistant: Some("clerk".into()), metadata: map(metadata), ..new_session("x") };
    t.create(&ada(), new).await.unwrap();
}

fn instructed(text: &str) -> Assistant {
    clerk(|a| a.instructions = Some(text.to_owned()))
}

on_every_store! {
    /// Instructions with `{{` or `{%` are templates over the session; others are used as they are.
    async fn instructions_are_templates(test: &mut TestTenure) {
        let t = &test.tenure;
        let (model, none) = (ScriptedModel::new([text_answer("Yes.")]), CountingTools::default());
        let text = "Help {{ metadata.name }} ({{ user }}) at {{ now }}.{% if metadata.tier == 'gold' %} Be quick.{% endif %}\n";
        t.declare(instructed(text));
        create_with(t, json!({"name": "Ada", "tier": "gold"})).await;
        run_turn(t, question("Hello?"), &model, &none).await.unwrap();
        let now = t.now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        assert_eq!(model.last_prompt()[0], format!("Help Ada (ada) at {now}. Be quick.\n"));
        let patch = SessionPatch { metadata: map(json!({"tier": null})), ..SessionPatch::default() };
        t.update(&ada(), &id("x"), patch).await.unwrap();
        run_turn(t, question("Still there?"), &model, &none).await.unwrap();
        assert_eq!(model.last_prompt()[0], format!("Help Ada (ada) at {now}.\n"));
        let shown = t.preview(&ada(), &question("Again?")).await.unwrap();
        assert_eq!(shown[0].text(), format!("Help Ada (ada) at {now}.\n"));
        for plain in ["Use { and } and {# this #} as they are.\n", "  spaces \n\n"] {
            t.declare(instructed(plain));
            run_turn(t, question("Plain?"), &model, &none).await.unwrap();
            assert_eq!(model.last_prompt()[0], plain);
        }
    }

    /// A template that cannot be rendered fails the run, and nothing else.
    async fn a_failing_template_fails_the_run(test: &mut TestTenure) {
        let t = &test.tenure;
        t.declare(instructed("Bill {{ 100 / metadata.share }} to {{ metadata.address.city }}."));
        create_with(t, json!({"share": 0})).await;
        let (model, none) = (ScriptedModel::new([text_answer("Yes.")]), CountingTools::default());
        let error = run_turn(t, question("Hello?"), &model, &none).await.unwrap_err();
        assert_eq!((error.code(), model.call_count()), ("instructions_failed", 0), "{error}");
        let run = session_x(t).await.runs[0].clone();
        assert_eq!((run.ended.unwrap().1, run.code.as_deref()), (RunOutcome::Failed, Some("instructions_failed")));
        assert_eq!(t.preview(&ada(), &question("Again?")).await.unwrap_err().code(), "invalid");
        let metadata = map(json!({"share": 4, "address": {"city": "Bern"}}));
        t.update(&ada(), &id("x"), SessionPatch { metadata, ..SessionPatch::default() }).await.unwrap();
        run_turn(t, question("And now?"), &model, &none).await.unwrap();
        assert_eq!(model.last_prompt()[0], "Bill 25.0 to Bern.");
        // Assistants that tenants create are checked.
        for (assistant, want) in [
            (Assistant { name: "a".into(), ..instructed("{{ x") }, "instructions"),
            (Assistant { name: "a".into(), ..clerk(|a| a.review = vec![reviewed("a"), ReviewRule { condition: Some("x >".into()), ..reviewed("b") }]) }, "review[1].when"),
        ] {
            let error = t.put_assistant(&admin(), assistant).await.unwrap_err();
            assert!(matches!(&error, Error::Invalid { param, .. } if param == want), "{error}");
        }
        assert!(t.assistant(&admin(), "a").await.unwrap().is_none());
    }

    /// The model reads and changes the permitted keys; a change is an entry of the log.
    async fn the_metadata_tool(test: &mut TestTenure) {
        let t = &test.tenure;
        let source = serde_json::from_value(json!({"metadata": {"keys": ["task_progress", "hitl_decisions"]}})).unwrap();
        t.declare(clerk(|a| a.tools = vec![source]));
        create_with(t, json!({"customer_id": "c1", "task_progress": {"read": true}})).await;
        let update = |patch: Value| json!({"action": "update", "patch": patch});
        let model = ScriptedModel::new([
            tool_calls_answer(&[("c1", "metadata", json!({"action": "read"})), ("c2", "metadata", update(json!({"task_progress": {"sent": 2}})))]),
            tool_calls_answer(&[
                ("c3", "metadata", update(json!({"customer_id": "c2"}))),
                ("c4", "metadata", update(json!({"hitl_decisions": []}))),
                ("c5", "metadata", json!({"action": "forget"})),
                ("c6", "metadata", update(json!({"task_progress": "x".repeat(t.limits().max_info_bytes)}))),
            ]),
            text_answer("Done."),
        ]);
        run_turn(t, question("Go on."), &model, &CountingTools::default()).await.unwrap();
        let s = session_x(t).await;
        let results: Vec<String> = s.messages.iter().filter(|m| m.message.tool_call_id().is_some()).map(|m| m.message.text()).collect();
        assert_eq!(results[0], json!({"metadata": {"task_progress": {"read": true}}}).to_string());
        assert_eq!(results[1], json!({"metadata": {"task_progress": {"read": true, "sent": 2}}}).to_string());
        for (result, want) in results[2..].iter().zip(["not permitted", "not permitted", "valid actions", "max_info_bytes"]) {
            assert!(result.starts_with('[') && result.contains(want), "{result}");
        }
        assert_eq!(Value::Object(s.head().info.metadata.clone()), json!({"customer_id": "c1", "task_progress": {"read": true, "sent": 2}}));
        let log = t.export(&ada(), &id("x")).await.unwrap().log;
        assert_eq!(log.iter().filter(|r| matches!(&r.entry, Entry::Info(patch) if !patch.metadata.is_empty())).count(), 1);
        test.reopen().await;
        assert_eq!(session_x(&test.tenure).await.head().info.metadata["task_progress"]["sent"], 2);
    }
}

/// Tools that record the metadata of their context.
#[derive(Default)]
struct ContextTools(Mutex<Vec<Value>>);

#[async_trait]
impl Tools for ContextTools {
    async fn list(&self, _: &ToolContext<'_>) -> Result<Vec<Tool>, ToolError> {
        Ok(vec![tool("look")])
    }

    async fn call(&self, context: &ToolContext<'_>, _: &ToolInvocation) -> Result<ToolOutput, ToolError> {
        self.0.lock().unwrap().push(Value::Object(context.metadata.cloned().unwrap_or_default()));
        Ok(ToolOutput::default())
    }
}

/// A tool is called with the session's metadata, including what the run has just changed.
#[tokio::test(flavor = "multi_thread")]
async fn tools_receive_the_metadata() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    let t = &test.tenure;
    t.declare(clerk(|a| a.tools = vec![ToolSource::Metadata(MetadataSource::default())]));
    create_with(t, json!({"customer_id": "c1"})).await;
    let update = json!({"action": "update", "patch": {"preferences": {"units": "metric"}}});
    let model = ScriptedModel::new([
        tool_calls_answer(&[("c1", "look", json!({}))]),
        tool_calls_answer(&[("c2", "metadata", update)]),
        tool_calls_answer(&[("c3", "look", json!({}))]),
        text_answer("Done."),
    ]);
    let tools = ContextTools::default();
    let turn = begin(t, question("Look.")).await.unwrap();
    turn.execute(Executors::new(&model).tools(&tools)).await.unwrap();
    let seen = tools.0.into_inner().unwrap();
    assert_eq!(seen, [json!({"customer_id": "c1"}), json!({"customer_id": "c1", "preferences": {"units": "metric"}})]);
}
