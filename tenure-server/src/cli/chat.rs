//! `tenure chat`: talking in a session.

use super::client::{ApiClient, ApiRefusal, PageStream};
use super::output::{self, clean, field, line, note, print, short};
use super::sessions::{checkpoints_table, compacted_text, fork_at, place, rewound_text, sessions_table};
use super::target::{Needs, TargetArgs};
use super::terminal::{LineInput, TerminalEvent};
use crate::llm::sse::SseDecoder;
use anyhow::{anyhow, bail};
use axum::http::Method;
use clap::Args;
use futures_util::StreamExt;
use serde_json::{Value, json};
use tenure::{ModelAnswer, ModelChunk, SessionId};

const HELP: &str = "\
/fork [PLACE]      go on in a new session that begins like this one
/rewind PLACE      go back: a number of messages, turn:N, or a checkpoint
/checkpoints       list the checkpoints
/checkpoint LABEL  make one here
/compact [N]       have all but the last turns (2) summarized for the model
/history [N]       what was said last (10)
/sessions          list sessions
/switch ID         go on in another session
/title TEXT        give this session a title
/model [NAME]      ask another model, or list them
/new               begin a new session
/help              this
/quit              leave (or Ctrl-D)
A line that ends with \\ goes on in the next. //text says /text. Ctrl-C stops an answer.";

/// Whom to talk to.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// The session; a new one if none is named, or if there is none of that name
    session: Option<String>,
    /// The model
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The assistant of a new session
    #[arg(long, value_name = "NAME")]
    assistant: Option<String>,
}

/// A conversation.
struct ChatSession {
    client: ApiClient,
    input: LineInput,
    id: SessionId,
    /// Whether the session is there; an id that nobody knows becomes one with the first message.
    begun: bool,
    model: Option<String>,
    assistant: Option<String>,
    /// Whether the last answer was stopped, and its turn may still be on.
    stopped: bool,
}

/// What a line that begins with a slash asks for.
enum SlashCommand<'a> {
    Help,
    Quit,
    New,
    /// The last so many messages.
    History(usize),
    Sessions,
    /// The id of a session, perhaps shortened.
    Switch(&'a str),
    Models,
    Model(&'a str),
    /// A place; the end if none is named.
    Fork(Option<&'a str>),
    /// A place, as the route takes it.
    Rewind(Value),
    Checkpoints,
    /// Its label; generated if there is none.
    Checkpoint(Option<&'a str>),
    /// How many turns stay as they are.
    Compact(Option<usize>),
    Title(&'a str),
}

impl<'a> SlashCommand<'a> {
    /// Reads a line, without its slash.
    fn parse(command: &'a str) -> anyhow::Result<Self> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let argument = Some(rest.trim()).filter(|rest| !rest.is_empty());
        let needs = |what: &str| argument.ok_or_else(|| anyhow!("/{name} needs {what}"));
        let number = |what: &str| argument.map(str::parse).transpose().map_err(|_| anyhow!("/{name} takes {what}"));
        Ok(match name {
            "help" | "?" => Self::Help,
            "quit" | "exit" | "q" => Self::Quit,
            "new" => Self::New,
            "history" => Self::History(number("a number")?.unwrap_or(10).clamp(1, 100)),
            "sessions" => Self::Sessions,
            "switch" => Self::Switch(needs("the id of a session")?),
            "model" => argument.map_or(Self::Models, Self::Model),
            "fork" => Self::Fork(argument),
            "rewind" => Self::Rewind(place(needs("a place: a number of messages, turn:N, or a checkpoint")?)?),
            "checkpoints" => Self::Checkpoints,
            "checkpoint" => Self::Checkpoint(argument),
            "compact" => Self::Compact(number("a number of turns")?),
            "title" => Self::Title(needs("a text")?),
            _ => bail!("there is no /{}; /help lists what there is, //{} says it", clean(name), clean(command)),
        })
    }
}

/// What comes after a command.
enum NextPrompt {
    GoOn,
    Leave,
}

impl ChatArgs {
    /// Talks until there is no more to say.
    pub async fn run(self, at: &TargetArgs) -> anyhow::Result<()> {
        let client = at.client(Needs::Models).await?;
        let id = match &self.session {
            Some(given) => client.resolve(given).await?,
            None => SessionId::generate(),
        };
        let recent = if self.session.is_some() { recent(&client, &id, 100).await? } else { None };
        let said = |m: &Value| (field(&m["message"], "role") == "user").then(|| output::text(&m["message"]));
        let before = recent.iter().flatten().filter_map(said).collect();
        let input = LineInput::open(before);
        let (begun, model, assistant) = (recent.is_some(), self.model, self.assistant);
        let mut talk = ChatSession { client, input, id, begun, model, assistant, stopped: false };
        talk.greet(recent.as_deref())?;
        talk.listen().await
    }
}

/// The last messages; `None` if there is no such session.
async fn recent(client: &ApiClient, id: &SessionId, count: usize) -> anyhow::Result<Option<Vec<Value>>> {
    match client.get::<Value>(&format!("/sessions/{id}/messages?last={count}")).await {
        Ok(mut page) => Ok(Some(page["data"].as_array_mut().map(std::mem::take).unwrap_or_default())),
        Err(e) => match ApiRefusal::of(&e).map(|r| r.status) {
            Some(404) => Ok(None),
            // Expired: what becomes of it is the server's to say when the first message comes.
            Some(410) => Ok(Some(Vec::new())),
            _ => Err(e),
        },
    }
}

impl ChatSession {
    fn greet(&self, recent: Option<&[Value]>) -> anyhow::Result<()> {
        let new = if self.begun { "" } else { "new " };
        note(format!("{new}session {}", self.id));
        if !self.input.is_terminal() {
            return Ok(());
        }
        note("/help lists what there is besides talking; Ctrl-D leaves");
        let recent = recent.unwrap_or_default();
        let last = &recent[recent.len().saturating_sub(2)..];
        Ok(last.iter().try_for_each(|said| print(format!("\n{}", output::said(said))))?)
    }

    async fn listen(&mut self) -> anyhow::Result<()> {
        loop {
            let prompt = short(self.id.as_str()).to_owned();
            let text = match self.input.ask(&prompt)? {
                TerminalEvent::End => return Ok(()),
                TerminalEvent::Nothing => continue,
                TerminalEvent::Line(text) if text.trim().is_empty() => continue,
                TerminalEvent::Line(text) => text,
            };
            let done = match text.strip_prefix('/') {
                Some(command) if !command.starts_with('/') => self.obey(command).await,
                literal => {
                    let text = literal.unwrap_or(&text);
                    self.say(format!(r#"{{"role":"user","content":{}}}"#, json!(text))).await.map(|()| NextPrompt::GoOn)
                }
            };
            match done {
                Ok(NextPrompt::GoOn) => {}
                Ok(NextPrompt::Leave) => return Ok(()),
                // A person can try again; a script should know.
                Err(e) if self.input.is_terminal() && e.downcast_ref::<std::io::Error>().is_none() => {
                    note(format!("error: {}", clean(&format!("{e:#}"))));
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Says something and shows the answer; while the model calls tools, asks for their results.
    async fn say(&mut self, message: String) -> anyhow::Result<()> {
        let mut messages = vec![message];
        loop {
            let Some(answer) = self.answer(&messages).await? else { return Ok(()) };
            let calls = answer["tool_calls"].as_array().cloned().unwrap_or_default();
            messages.clear();
            for call in &calls {
                line(clean(&format!("→ {}", output::call(call))))?;
                let name = output::call(call);
                let name = name.split(' ').next().unwrap_or_default();
                match self.input.ask(&clean(&format!("result of {name}")))? {
                    TerminalEvent::Line(text) => {
                        let (id, text) = (&call["id"], json!(text));
                        messages.push(format!(r#"{{"role":"tool","tool_call_id":{id},"content":{text}}}"#));
                    }
                    TerminalEvent::Nothing | TerminalEvent::End => {
                        note("the call stays without a result");
                        return Ok(());
                    }
                }
            }
            if messages.is_empty() {
                return Ok(());
            }
        }
    }

    /// One answer, shown as it comes. `None` if it was stopped.
    async fn answer(&mut self, messages: &[String]) -> anyhow::Result<Option<Value>> {
        // Whoever stops an answer, or closes the terminal, does not want the rest of it.
        let mut body = json!({"session_id": self.id, "history": "append", "stream": true, "on_disconnect": "cancel"});
        if let Some(model) = &self.model {
            body["model"] = json!(model);
        }
        if let Some(assistant) = self.assistant.as_ref().filter(|_| !self.begun) {
            body["assistant_id"] = json!(assistant);
        }
        // An answer that was stopped may still be on: this one takes its place.
        if std::mem::take(&mut self.stopped) {
            body["on_busy"] = json!("interrupt");
        }
        // Messages are kept as they are sent: the role comes first, as everybody writes it.
        let mut body = body.to_string();
        body.pop();
        body.push_str(&format!(r#","messages":[{}]}}"#, messages.join(",")));
        let terminal = self.input.is_terminal();
        let stop = async {
            if !terminal || tokio::signal::ctrl_c().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let mut run = None;
        let heard = tokio::select! {
            heard = hear(&self.client, body, &mut run) => Some(heard),
            () = stop => None,
        };
        match heard {
            Some(answer) => {
                let answer = answer?;
                self.begun = true;
                Ok(Some(answer))
            }
            None => {
                line("")?;
                // What was asked is stored before the model is.
                (self.begun, self.stopped) = (true, true);
                if let Some(run) = run {
                    let path = format!("/sessions/{}/runs/{run}/cancel", self.id);
                    // It may have ended by itself meanwhile.
                    self.stopped = self.client.send(Method::POST, &path, None).await.is_err();
                }
                note("stopped; what was said until then is kept");
                Ok(None)
            }
        }
    }

    async fn obey(&mut self, command: &str) -> anyhow::Result<NextPrompt> {
        match SlashCommand::parse(command)? {
            SlashCommand::Help => line(HELP)?,
            SlashCommand::Quit => return Ok(NextPrompt::Leave),
            SlashCommand::New => self.go_to(SessionId::generate(), false),
            SlashCommand::History(count) => self.history(count).await?,
            SlashCommand::Sessions => self.sessions().await?,
            SlashCommand::Switch(id) => self.switch(id).await?,
            SlashCommand::Models => self.models().await?,
            SlashCommand::Model(name) => {
                note(format!("the next answer is {name}'s"));
                self.model = Some(name.to_owned());
            }
            SlashCommand::Fork(at) => self.fork(at).await?,
            SlashCommand::Rewind(to) => self.rewind(to).await?,
            SlashCommand::Checkpoints => self.checkpoints().await?,
            SlashCommand::Checkpoint(label) => self.checkpoint(label).await?,
            SlashCommand::Compact(keep) => self.compact(keep).await?,
            SlashCommand::Title(title) => self.title(title).await?,
        }
        Ok(NextPrompt::GoOn)
    }

    async fn history(&self, count: usize) -> anyhow::Result<()> {
        let messages = recent(&self.client, &self.id, count).await?.unwrap_or_default();
        Ok(print(messages.iter().map(output::said).collect::<String>())?)
    }

    async fn sessions(&self) -> anyhow::Result<()> {
        let (sessions, _) = PageStream::new(&self.client, "/sessions", &[], 20).all().await?;
        Ok(print(sessions_table(&sessions, false))?)
    }

    async fn switch(&mut self, given: &str) -> anyhow::Result<()> {
        let id = self.client.resolve(given).await?;
        let Some(last) = recent(&self.client, &id, 2).await? else {
            bail!("there is no session {id}; /sessions lists them, /new begins one");
        };
        self.go_to(id, true);
        Ok(print(last.iter().map(output::said).collect::<String>())?)
    }

    async fn models(&self) -> anyhow::Result<()> {
        let models: Value = self.client.get("/v1/models").await?;
        let names = models["data"].as_array().into_iter().flatten().map(|m| clean(field(m, "id")) + "\n");
        Ok(print(names.collect::<String>())?)
    }

    async fn fork(&mut self, at: Option<&str>) -> anyhow::Result<()> {
        self.begin().await?;
        let forked = fork_at(&self.client, self.id.as_str(), at, None).await?;
        self.go_to(SessionId::new(field(&forked, "id"))?, true);
        Ok(())
    }

    async fn rewind(&self, to: Value) -> anyhow::Result<()> {
        let path = format!("/sessions/{}/rewind", self.id);
        let rewound: Value = self.client.post(&path, &to).await?.json().await?;
        Ok(line(rewound_text(self.id.as_str(), &rewound))?)
    }

    async fn checkpoints(&mut self) -> anyhow::Result<()> {
        self.begin().await?;
        let list: Value = self.client.get(&format!("/sessions/{}/checkpoints", self.id)).await?;
        Ok(print(checkpoints_table(list["data"].as_array().map(Vec::as_slice).unwrap_or_default()))?)
    }

    async fn checkpoint(&mut self, label: Option<&str>) -> anyhow::Result<()> {
        self.begin().await?;
        let body = label.map_or(json!({}), |label| json!({"label": label}));
        let path = format!("/sessions/{}/checkpoints", self.id);
        let made: Value = self.client.post(&path, &body).await?.json().await?;
        Ok(line(clean(&format!("checkpoint {} after message {}", field(&made, "label"), made["position"])))?)
    }

    async fn compact(&self, keep_turns: Option<usize>) -> anyhow::Result<()> {
        let path = format!("/sessions/{}/compact", self.id);
        let done: Value = self.client.post(&path, &json!({"keep_turns": keep_turns})).await?.json().await?;
        Ok(line(compacted_text(&done))?)
    }

    async fn title(&mut self, title: &str) -> anyhow::Result<()> {
        self.begin().await?;
        let body = json!({"title": title}).to_string();
        self.client.send(Method::PATCH, &format!("/sessions/{}", self.id), Some(body)).await?;
        Ok(line(format!("this is {:?} now", clean(title)))?)
    }

    fn go_to(&mut self, id: SessionId, begun: bool) {
        (self.id, self.begun, self.stopped) = (id, begun, false);
        note(format!("{}session {}", if begun { "" } else { "new " }, self.id));
    }

    /// Makes the session if it is not there yet.
    async fn begin(&mut self) -> anyhow::Result<()> {
        if !self.begun {
            let mut body = json!({"id": self.id});
            if let Some(assistant) = &self.assistant {
                body["assistant_id"] = json!(assistant);
            }
            self.client.post("/sessions", &body).await?;
            self.begun = true;
        }
        Ok(())
    }
}

/// Asks, and prints the answer as it comes; the whole message at the end. Tells which run it is as soon as that is known.
async fn hear(client: &ApiClient, body: String, run: &mut Option<String>) -> anyhow::Result<Value> {
    let mut response = client.send(Method::POST, "/v1/chat/completions", Some(body)).await?;
    let (mut events, mut answer, mut done) = (SseDecoder::default(), ModelAnswer::default(), false);
    let mut said = false;
    while let Some(part) = response.body.next().await {
        events.push(&part?).map_err(|why| anyhow!(why))?;
        while let Some(data) = events.next_event() {
            if data == "[DONE]" {
                done = true;
                continue;
            }
            let chunk: Value = serde_json::from_str(&data)?;
            if let Some(id) = chunk["run_id"].as_str() {
                *run = Some(id.to_owned());
            }
            if let Some(why) = chunk["error"]["message"].as_str() {
                bail!("the answer broke off: {why}");
            }
            if let Some(text) = chunk["choices"][0]["delta"]["content"].as_str().filter(|t| !t.is_empty()) {
                print(clean(text))?;
                said = true;
            }
            answer.take(&ModelChunk::Chunk(data)).map_err(|why| anyhow!(why))?;
        }
    }
    if said {
        line("")?;
    }
    if !done {
        bail!("the answer broke off; what was said until then is kept");
    }
    Ok(answer.message().map_or(Value::Null, |m| m.to_value()))
}
