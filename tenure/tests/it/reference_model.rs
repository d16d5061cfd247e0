//! A reference model: sessions as plain lists. Random operations are applied to a store and to the
//! model, and both must agree after every step. The seed is printed; set `TENURE_TEST_SEED` to
//! reproduce a run.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use std::collections::BTreeMap;
use tenure::{log::*, session::*};

#[derive(Clone, Debug, Default, PartialEq)]
struct Model {
    messages: Vec<String>,
    /// Label and position.
    checkpoints: Vec<(String, usize)>,
    status: Status,
    title: Option<String>,
    discarded: Vec<Vec<String>>,
}

impl Model {
    fn rewind_to(&mut self, position: usize, checkpoints: usize) {
        let gone = self.messages.split_off(position);
        if !gone.is_empty() {
            self.discarded.push(gone);
        }
        self.checkpoints.truncate(checkpoints);
    }

    /// The number of checkpoints that remain when the messages from `position` on are discarded.
    fn checkpoints_before(&self, position: usize) -> usize {
        self.checkpoints.iter().take_while(|c| c.1 <= position).count()
    }

    fn turn_starts(&self) -> Vec<usize> {
        let user = |i: usize| self.messages[i].contains(r#""role":"user""#);
        (0..self.messages.len()).filter(|i| user(*i) && (*i == 0 || !user(*i - 1))).collect()
    }
}

/// A small deterministic random number generator.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % limit.max(1)
    }
}

fn seed() -> u64 {
    let given = std::env::var("TENURE_TEST_SEED").ok().and_then(|s| s.parse().ok());
    given.unwrap_or_else(|| {
        u64::from_le_bytes(*blake3::hash(SessionId::generate().as_str().as_bytes()).as_bytes().first_chunk().unwrap())
            | 1
    })
}

on_every_store! {
    /// Every store agrees with the model after every step.
    async fn every_store_equals_the_model(test: &mut TestTenure) {
        let seed = seed();
        println!("TENURE_TEST_SEED={seed}");
        let mut random = Random(seed);
        let mut model: BTreeMap<String, Model> = BTreeMap::new();
        let principal = ada();
        let steps = if test.url().starts_with("postgres") { 250 } else { 400 };
        for step in 0..steps {
            test.advance(SignedDuration::from_millis(1));
            let operation = apply_random_operation(test, &principal, &mut random, &mut model, step).await;
            compare(test, &principal, &model).await.unwrap_or_else(|e| panic!("step {step} ({operation}), seed {seed}: {e}"));
        }
    }
}

fn random_messages(random: &mut Random, step: usize) -> Vec<Message> {
    match random.below(5) {
        0 => turn_messages(step),
        1 => vec![Message::user(&format!("only a question {step}"))],
        2 => vec![image_message(&format!("picture {step}"), &format!("{}", step % 3)), Message::assistant("seen")],
        3 => vec![Message::user("short"), Message::assistant("answer")],
        _ => [turn_messages(step), turn_messages(step + 1000)].concat(),
    }
}

async fn apply_random_operation(
    test: &mut TestTenure,
    principal: &Principal,
    random: &mut Random,
    model: &mut BTreeMap<String, Model>,
    step: usize,
) -> String {
    let names: Vec<String> = model.keys().cloned().collect();
    if names.is_empty() || (names.len() < 6 && random.below(8) == 0) {
        let name = format!("s{step}");
        test.tenure.create(principal, new_session(&name)).await.unwrap();
        model.insert(name.clone(), Model::default());
        return format!("create {name}");
    }
    let name = names[random.below(names.len())].clone();
    let x = id(&name);
    let t = test.tenure.clone();
    let m = model.get_mut(&name).unwrap();
    let live = m.status.is_live();
    match random.below(16) {
        0..=4 => {
            let messages = random_messages(random, step);
            let result = t.append(principal, &x, messages.clone()).await;
            if m.status == Status::Active {
                result.unwrap();
                m.messages.extend(raw(&messages));
                if messages.last().unwrap().role() == Role::Assistant {
                    m.checkpoints.push((format!("turn-{}", m.turn_starts().len()), m.messages.len()));
                }
            } else {
                assert!(result.is_err());
            }
            format!("append to {name}")
        }
        5 if live => {
            let label = format!("cp{}", random.below(4));
            t.checkpoint(principal, &x, Some(CheckpointLabel::new(&label).unwrap())).await.unwrap();
            m.checkpoints.push((label, m.messages.len()));
            format!("checkpoint {name}")
        }
        6 if live && !m.checkpoints.is_empty() => {
            let label = m.checkpoints[random.below(m.checkpoints.len())].0.clone();
            t.rewind(principal, &x, &*label).await.unwrap();
            let last = m.checkpoints.iter().rposition(|c| c.0 == label).unwrap();
            m.rewind_to(m.checkpoints[last].1, last + 1);
            format!("rewind {name} to {label}")
        }
        7 if live => {
            let position = random.below(m.messages.len() + 1);
            t.rewind(principal, &x, Point::Position(position)).await.unwrap();
            m.rewind_to(position, m.checkpoints_before(position));
            format!("rewind {name} to position {position}")
        }
        8 if live => {
            let starts = m.turn_starts();
            let turns = random.below(starts.len() + 1);
            t.rewind(principal, &x, Point::Turn(turns)).await.unwrap();
            let position = starts.get(turns).copied().unwrap_or(m.messages.len());
            m.rewind_to(position, m.checkpoints_before(position));
            format!("rewind {name} to turn {turns}")
        }
        9 | 10 if live => {
            let position = random.below(m.messages.len() + 1);
            let end = position == m.messages.len() && random.below(2) == 0;
            let point = if end { Point::End } else { Point::Position(position) };
            let new = format!("f{step}");
            t.fork(principal, &x, Fork::at(point).id(Some(id(&new)))).await.unwrap();
            let mut fork = m.clone();
            (fork.status, fork.discarded) = (Status::Active, Vec::new());
            let checkpoint_count = fork.checkpoints_before(position);
            fork.messages.truncate(position);
            fork.checkpoints.truncate(checkpoint_count);
            model.insert(new.clone(), fork);
            format!("fork {name} at {position} as {new}")
        }
        11 if live => {
            let title = format!("title {step}");
            t.update(principal, &x, SessionPatch { title: Patch::Set(title.clone()), ..SessionPatch::default() })
                .await
                .unwrap();
            m.title = Some(title);
            format!("title of {name}")
        }
        12 => {
            match m.status {
                Status::Active if random.below(2) == 0 => drop(t.pause(principal, &x, None).await.unwrap()),
                Status::Active => drop(t.delete(principal, &x, None).await.unwrap()),
                Status::Paused => drop(t.activate(principal, &x).await.unwrap()),
                _ => drop(t.restore(principal, &x, None).await.unwrap()),
            }
            m.status = t.head(principal, &x).await.unwrap().status;
            format!("status of {name} is {}", m.status)
        }
        13 if names.len() > 3 => {
            t.purge(principal, &x, None).await.unwrap();
            model.remove(&name);
            format!("purge {name}")
        }
        14 if m.status == Status::Active => {
            let messages = random_messages(random, step);
            t.import(principal, &x, Export { messages: messages.clone(), ..Export::default() }, None).await.unwrap();
            m.rewind_to(0, 0);
            (m.messages, m.title) = (raw(&messages), None);
            format!("import into {name}")
        }
        15 if random.below(3) == 0 => {
            drop(t);
            test.reopen().await;
            "reopen".to_owned()
        }
        _ => "nothing".to_owned(),
    }
}

async fn compare(
    test: &TestTenure,
    principal: &Principal,
    model: &BTreeMap<String, Model>,
) -> std::result::Result<(), String> {
    for (name, m) in model {
        let s = test.tenure.load_any(principal, &id(name)).await.map_err(|e| format!("{name}: {e}"))?;
        let same = |property: &str, stored: String, expected: String| {
            if stored == expected {
                Ok(())
            } else {
                Err(format!("{name}: {property} differ\n store {stored}\n model {expected}"))
            }
        };
        let checkpoints = labels(&s);
        same("messages", texts(&s).join("\n"), m.messages.join("\n"))?;
        same("checkpoints", format!("{checkpoints:?}"), format!("{:?}", m.checkpoints))?;
        same(
            "status and title",
            format!("{:?} {:?}", s.head().status, s.head().info.title),
            format!("{:?} {:?}", m.status, m.title),
        )?;
        let mut digest = LogDigest::default();
        s.messages.iter().for_each(|message| digest.advance(&message.message));
        same("digest", format!("{:?}", s.head().digest), format!("{digest:?}"))?;
        if m.status.is_live() {
            let tail = test.tenure.last_messages(principal, &id(name), 5).await.map_err(|e| e.to_string())?;
            same("tail", format!("{tail:?}"), format!("{:?}", &s.messages[s.messages.len().saturating_sub(5)..]))?;
        }
    }
    let mut query = SessionQuery::new(OwnerFilter::AllTenants, 100);
    query.status = vec![Status::Active, Status::Paused, Status::Expired, Status::Deleted];
    let page = test.tenure.list(principal, query).await.map_err(|e| e.to_string())?;
    let mut listed: Vec<_> = page.heads.iter().map(|h| h.info.session_id.to_string()).collect();
    listed.sort();
    if listed.iter().eq(model.keys()) { Ok(()) } else { Err(format!("list differs: {listed:?}")) }
}
