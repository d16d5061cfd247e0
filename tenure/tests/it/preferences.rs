//! Preferences: memories that are injected in every turn (D-131).

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use serde_json::json;
use std::collections::BTreeSet;
use tenure::{memory::*, policy::*, run::*, session::*, store::*, *};

fn bob() -> Principal {
    Principal::new("acme", "bob").unwrap()
}

fn fact(text: &str) -> NewMemory {
    NewMemory::from(text)
}

fn preference(text: &str) -> NewMemory {
    NewMemory { kind: Some(MemoryKind::Preference), ..fact(text) }
}

on_every_store! {
    /// A preference that was stored in one session is injected in every turn of another, whatever is
    /// asked, and facts only when they are relevant.
    async fn preferences_carry_over(test: &mut TestTenure) {
        let t = &test.tenure;
        t.declare(clerk(|a| {
            a.memory = Some(MemoryConfig { scope: MemoryScope::User, ..MemoryConfig::default() });
            a.tools = vec![ToolSource::Memory];
        }));
        let none = CountingTools::default();
        let remember = |text: &str, kind| json!({"action": "remember", "text": text, "kind": kind});
        let model = ScriptedModel::new([
            tool_calls_answer(&[
                ("c1", "memory", remember("always use metric units", "preference")),
                ("c2", "memory", remember("owns a dog", "fact")),
                ("c3", "memory", remember("x", "opinion")),
            ]),
            text_answer("I will."),
        ]);
        run_turn(t, question("Please always use metric units."), &model, &none).await.unwrap();
        assert!(session_x(t).await.messages[4].message.text().contains("opinion"), "an unknown kind is reported to the model");
        let model = ScriptedModel::new([text_answer("Far.")]);
        let turn = begin(t, TurnRequest { session: Some(id("y")), ..question("How far is it to Rome?") }).await.unwrap();
        let injected = turn.reconcile_report().memories.clone();
        assert_eq!(injected.iter().map(|m| (m.kind, m.score)).collect::<Vec<_>>(), [(MemoryKind::Preference, 0.0)]);
        execute(*turn, &model, &none).await.unwrap();
        let today = t.now().strftime("%Y-%m-%d").to_string();
        let block = "[preferences] Preferences, newest first. Follow them in every answer. If two contradict, the newer one applies.";
        assert_eq!(model.last_prompt(), [format!("{block}\n- {today}: always use metric units\n[/preferences]"), "How far is it to Rome?".to_owned()]);
        let turn = begin(t, TurnRequest { session: Some(id("z")), ..question("How is my dog?") }).await.unwrap();
        execute(*turn, &model, &none).await.unwrap();
        let facts = "[memories] Facts from earlier conversations, newest first. If two contradict, the newer one applies.";
        assert_eq!(model.last_prompt()[0], format!("{block}\n- {today}: always use metric units\n[/preferences]\n{facts}\n- {today}: owns a dog\n[/memories]"));
        // Of another user, nothing.
        let bobs = TurnRequest { session: Some(id("b")), ..question("How far?") };
        let TurnStart::Run(turn) = t.begin_turn(&bob(), bobs).await.unwrap() else { panic!() };
        assert!(turn.reconcile_report().memories.is_empty());
    }

    /// Both kinds are listed, forgotten, retracted, evicted, expire and are erased alike, and the index of
    /// preferences follows.
    async fn preferences_end_like_facts(test: &mut TestTenure) {
        let t = &test.tenure;
        let retention = Some("1h".parse().unwrap());
        t.declare(clerk(|a| a.memory = Some(MemoryConfig { scope: MemoryScope::User, max_entries: Some(5), retention, ..MemoryConfig::default() })));
        t.create(&ada(), NewSession { assistant: Some("clerk".into()), ..new_session("s") }).await.unwrap();
        let target = MemoryTarget::Session(id("s"));
        let listed = async |kind| -> Vec<String> {
            let list = t.memory_list(&ada(), &target, Some(kind), None, 100).await.unwrap();
            list.into_iter().map(|m| m.text).collect::<BTreeSet<_>>().into_iter().collect()
        };
        let index = Namespace { tenant: Tenant::new("acme").unwrap(), owner: Owner::User(User::new("ada").unwrap()), name: "memory-preferences".into() };
        let indexed = async || t.store().items(&index, None, 100).await.unwrap().len();
        t.remember(&ada(), &target, fact("owns a dog")).await.unwrap();
        let metric = t.remember(&ada(), &target, preference("use metric units")).await.unwrap();
        assert_eq!(metric.kind, MemoryKind::Preference);
        assert_eq!((listed(MemoryKind::Preference).await, listed(MemoryKind::Fact).await), (vec!["use metric units".to_owned()], vec!["owns a dog".to_owned()]));
        assert_eq!(t.remember(&ada(), &target, fact("use metric units")).await.unwrap().kind, MemoryKind::Preference, "kept");
        // It changes its kind when that is requested.
        let as_fact = NewMemory { kind: Some(MemoryKind::Fact), ..fact("use metric units") };
        assert_eq!(t.remember(&ada(), &target, as_fact).await.unwrap().kind, MemoryKind::Fact);
        assert_eq!((listed(MemoryKind::Preference).await.len(), indexed().await), (0, 0));
        t.remember(&ada(), &target, preference("use metric units")).await.unwrap();
        // forget
        assert!(t.forget_memory(&ada(), &target, &metric.id).await.unwrap());
        assert_eq!((listed(MemoryKind::Preference).await.len(), indexed().await), (0, 0));
        // rewind
        t.append(&ada(), &id("s"), vec![Message::user("Be brief.")]).await.unwrap();
        let messages = vec![t.load(&ada(), &id("s")).await.unwrap().messages[0].seq];
        t.remember(&ada(), &target, NewMemory { messages, ..preference("be brief") }).await.unwrap();
        assert_eq!((listed(MemoryKind::Preference).await.len(), indexed().await), (1, 1));
        t.rewind(&ada(), &id("s"), Point::Position(0)).await.unwrap();
        assert_eq!((listed(MemoryKind::Preference).await.len(), indexed().await), (0, 0));
        // max_entries: the least recently used memory is evicted, and its index entry with the next read.
        t.remember(&ada(), &target, preference("write English")).await.unwrap();
        for n in 0..5 {
            test.advance(SignedDuration::from_secs(1));
            t.remember(&ada(), &target, fact(&format!("fact {n}"))).await.unwrap();
        }
        assert_eq!((t.memory_list(&ada(), &target, None, None, 100).await.unwrap().len(), indexed().await), (5, 1));
        assert_eq!((listed(MemoryKind::Preference).await.len(), indexed().await), (0, 0));
        // retention
        t.remember(&ada(), &target, preference("write English")).await.unwrap();
        test.advance(SignedDuration::from_hours(2));
        assert_eq!((listed(MemoryKind::Preference).await.len(), indexed().await), (0, 0));
        // erase
        t.remember(&ada(), &target, preference("write English")).await.unwrap();
        t.erase(&admin(), &User::new("ada").unwrap()).await.unwrap();
        assert_eq!(indexed().await, 0);
    }

    /// The number of preferences has a limit. They are injected within half of the token budget.
    async fn preferences_are_bounded(test: &mut TestTenure) {
        let t = &test.tenure;
        t.declare(clerk(|a| a.memory = Some(MemoryConfig { scope: MemoryScope::User, max_tokens: Some(200), ..MemoryConfig::default() })));
        for n in 0..MAX_PREFERENCES {
            t.remember(&ada(), &MemoryTarget::Own, preference(&format!("preference number {n}"))).await.unwrap();
        }
        let error = t.remember(&ada(), &MemoryTarget::Own, preference("one more")).await.unwrap_err();
        assert!(matches!(&error, Error::Invalid { param, .. } if param == "kind"), "{error}");
        assert!(error.to_string().contains("32 preferences"), "{error}");
        t.remember(&ada(), &MemoryTarget::Own, preference("preference number 1")).await.unwrap();
        t.remember(&ada(), &MemoryTarget::Own, fact("likes tea")).await.unwrap();
        let turn = begin(t, question("Which tea?")).await.unwrap();
        let injected = &turn.reconcile_report().memories;
        let preferences = injected.iter().filter(|m| m.kind == MemoryKind::Preference).count();
        assert!((1..20).contains(&preferences), "{preferences}");
        assert_eq!(injected.len(), preferences + 1, "the fact still fits");
    }
}
