//! `tenure chat`: an interactive chat in a session.

use super::changes::{rewound_text, undo_turns};
use super::client::{ApiClient, ApiRefusal, PageStream, session_path};
use super::output::{self, clean, field, line, note, print, short};
use super::sessions::{checkpoints_table, compacted_text, fork_at, parse_position, sessions_table};
use super::target::{Needs, TargetArgs};
use super::terminal::{LineInput, TerminalEvent};
use crate::error::with_causes;
use crate::llm::sse::SseDecoder;
use anyhow::{anyhow, bail};
use axum::http::Method;
use clap::Args;
use futures_util::StreamExt;
use serde_json::{Value, json};
use tenure::{
    SessionId,
    run::{ModelAnswer, ModelChunk},
};

const HELP: &str = "\
/fork [POSITION]   fork this session and continue in the fork
/undo [N]          undo the last N turns (1)
/rewind POSITION   rewind to a number of messages, turn:N, or a checkpoint
/checkpoints       list the checkpoints
/checkpoint LABEL  create a checkpoint at the end
/compact [N]       summarize all but the last N turns (2)
/history [N]       show the last N messages (10)
/sessions          list sessions
/switch ID         switch to another session
/title TEXT        set the title of this session
/model [NAME]      switch to another model, or list the models
/new               start a new session
/help              show this list
/quit              quit (or Ctrl-D)
A line that ends with \\ is continued on the next line. //text sends /text. Ctrl-C cancels an answer.";

/// The session, model and assistant of the chat.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// The session; a new one if omitted. At a terminal, an unknown id is created only after a question
    session: Option<String>,
    /// The same as the argument
    #[arg(long = "session", value_name = "ID", conflicts_with = "session")]
    session_option: Option<String>,
    /// Create an unknown session without asking
    #[arg(long)]
    new: bool,
    /// The model
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The assistant of a new session
    #[arg(long, value_name = "NAME")]
    assistant: Option<String>,
}

/// The state of an interactive chat.
struct ChatSession {
    client: ApiClient,
    input: LineInput,
    id: SessionId,
    /// True if the session exists. An unknown id is created with the first message.
    created: bool,
    model: Option<String>,
    assistant: Option<String>,
    /// True if the last answer was cancelled and its turn may still be running.
    stopped: bool,
}

/// A parsed slash command.
enum SlashCommand<'a> {
    Help,
    Quit,
    New,
    /// Shows this many of the last messages.
    History(usize),
    Sessions,
    /// Continues another session, by its id or a part of it.
    Switch(&'a str),
    Models,
    Model(&'a str),
    /// Forks at a position. `None` means the end.
    Fork(Option<&'a str>),
    /// Rewinds to before this many of the last turns.
    Undo(u64),
    /// Rewinds to a position, in the form the route takes.
    Rewind(Value),
    Checkpoints,
    /// Sets a checkpoint with this label. `None` means a generated label.
    Checkpoint(Option<&'a str>),
    /// Compacts all but this many of the newest turns.
    Compact(Option<usize>),
    Title(&'a str),
}

impl<'a> SlashCommand<'a> {
    /// Parses a line without its leading slash.
    fn parse(command: &'a str) -> anyhow::Result<Self> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let argument = Some(rest.trim()).filter(|rest| !rest.is_empty());
        let needs = |expected: &str| argument.ok_or_else(|| anyhow!("/{name} needs {expected}"));
        let number =
            |expected: &str| argument.map(str::parse).transpose().map_err(|_| anyhow!("/{name} takes {expected}"));
        Ok(match name {
            "help" | "?" => Self::Help,
            "quit" | "exit" | "q" => Self::Quit,
            "new" => Self::New,
            "history" => Self::History(number("a number")?.unwrap_or(10).clamp(1, 100)),
            "sessions" => Self::Sessions,
            "switch" => Self::Switch(needs("the id of a session")?),
            "model" => argument.map_or(Self::Models, Self::Model),
            "fork" => Self::Fork(argument),
            "undo" => Self::Undo(number("a number of turns")?.unwrap_or(1).max(1) as u64),
            "rewind" => Self::Rewind(parse_position(needs("a place: a number of messages, turn:N, or a checkpoint")?)?),
            "checkpoints" => Self::Checkpoints,
            "checkpoint" => Self::Checkpoint(argument),
            "compact" => Self::Compact(number("a number of turns")?),
            "title" => Self::Title(needs("a text")?),
            _ => bail!(
                "unknown command /{}; /help lists the commands, //{} sends it as a message",
                clean(name),
                clean(command)
            ),
        })
    }
}

/// Whether the chat continues after a command.
enum NextPrompt {
    Continue,
    Quit,
}

impl ChatArgs {
    /// Runs the chat until the end of the input or `/quit`.
    pub async fn run(self, target: &TargetArgs) -> anyhow::Result<()> {
        let client = target.client(Needs::Models).await?;
        let named = self.session.or(self.session_option);
        let id = match &named {
            Some(id_part) => client.resolve(id_part).await?,
            None => SessionId::generate(),
        };
        let recent = if named.is_some() { recent(&client, &id, 100).await? } else { None };
        if named.is_some() && recent.is_none() && !self.new && super::terminal::is_interactive() {
            confirm_new_session(&client, &id).await?;
        }
        let user_text = |m: &Value| (field(&m["message"], "role") == "user").then(|| output::text(&m["message"]));
        let history = recent.iter().flatten().filter_map(user_text).collect();
        let input = LineInput::open(history);
        let created = recent.is_some();
        let model = self.model;
        let assistant = self.assistant;
        let mut chat = ChatSession { client, input, id, created, model, assistant, stopped: false };
        chat.greet(recent.as_deref())?;
        chat.run_loop().await
    }
}

/// Asks whether to create a session with an unknown id, which may be mistyped, and names similar ones. An answer
/// other than yes is an error.
async fn confirm_new_session(client: &ApiClient, id: &SessionId) -> anyhow::Result<()> {
    let similar = client.similar_ids(id.as_str()).await?;
    let hint = if similar.is_empty() { String::new() } else { format!("; did you mean {}?", similar.join(" or ")) };
    if !super::terminal::confirm(&clean(&format!("there is no session {id}{hint}\ncreate a new session {id}?")))? {
        bail!("no session was created; `tenure sessions list` lists them, --new creates one without asking");
    }
    Ok(())
}

/// Reads the last `count` messages. Returns `None` if there is no such session.
async fn recent(client: &ApiClient, id: &SessionId, count: usize) -> anyhow::Result<Option<Vec<Value>>> {
    match client.get::<Value>(&session_path(id, &format!("/messages?last={count}"))).await {
        Ok(mut page) => Ok(Some(page["data"].as_array_mut().map(std::mem::take).unwrap_or_default())),
        Err(e) => match ApiRefusal::from_error(&e).map(|r| r.status) {
            Some(404) => Ok(None),
            // The session has expired: the server applies `on_expired` when the first message arrives.
            Some(410) => Ok(Some(Vec::new())),
            _ => Err(e),
        },
    }
}

impl ChatSession {
    fn greet(&self, recent: Option<&[Value]>) -> anyhow::Result<()> {
        let new = if self.created { "" } else { "new " };
        note(format!("{new}session {}", self.id));
        if !self.input.is_terminal() {
            return Ok(());
        }
        note("/help lists the commands; Ctrl-D quits");
        let recent = recent.unwrap_or_default();
        let last = &recent[recent.len().saturating_sub(2)..];
        Ok(last.iter().try_for_each(|message| print(format!("\n{}", output::format_message(message))))?)
    }

    async fn run_loop(&mut self) -> anyhow::Result<()> {
        loop {
            let prompt = short(self.id.as_str()).to_owned();
            let text = match self.input.ask(&prompt)? {
                TerminalEvent::End => return Ok(()),
                TerminalEvent::Interrupted => continue,
                TerminalEvent::Line(text) if text.trim().is_empty() => continue,
                TerminalEvent::Line(text) => text,
            };
            let outcome = match text.strip_prefix('/') {
                Some(command) if !command.starts_with('/') => self.run_command(command).await,
                literal => {
                    let text = literal.unwrap_or(&text);
                    self.send_message(format!(r#"{{"role":"user","content":{}}}"#, json!(text)))
                        .await
                        .map(|()| NextPrompt::Continue)
                }
            };
            match outcome {
                Ok(NextPrompt::Continue) => {}
                Ok(NextPrompt::Quit) => return Ok(()),
                // At a terminal the user can retry; a script needs the failure.
                Err(e) if self.input.is_terminal() && e.downcast_ref::<std::io::Error>().is_none() => {
                    note(format!("error: {}", clean(&with_causes(&e))));
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Sends a message and prints the answer. While the model calls tools, the user is asked for their results.
    async fn send_message(&mut self, message: String) -> anyhow::Result<()> {
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
                        let id = &call["id"];
                        let text = json!(text);
                        messages.push(format!(r#"{{"role":"tool","tool_call_id":{id},"content":{text}}}"#));
                    }
                    TerminalEvent::Interrupted | TerminalEvent::End => {
                        note("the tool call is left open");
                        return Ok(());
                    }
                }
            }
            if messages.is_empty() {
                return Ok(());
            }
        }
    }

    /// Requests one answer and prints it while it is streamed. Returns `None` if the user cancelled it.
    async fn answer(&mut self, messages: &[String]) -> anyhow::Result<Option<Value>> {
        // A user who cancels an answer or closes the terminal does not want the rest of it.
        let mut body = json!({"session_id": self.id, "history": "append", "stream": true, "on_disconnect": "cancel"});
        if let Some(model) = &self.model {
            body["model"] = json!(model);
        }
        if let Some(assistant) = self.assistant.as_ref().filter(|_| !self.created) {
            body["assistant_id"] = json!(assistant);
        }
        // The turn of a cancelled answer may still be running: this one interrupts it.
        if std::mem::take(&mut self.stopped) {
            body["on_busy"] = json!("interrupt");
        }
        // Messages are stored exactly as sent: they are inserted as text, with the role first, as is customary.
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
        let outcome = tokio::select! {
            outcome = receive_answer(&self.client, body, &mut run) => Some(outcome),
            () = stop => None,
        };
        match outcome {
            Some(answer) => {
                let answer = answer?;
                self.created = true;
                Ok(Some(answer))
            }
            None => {
                line("")?;
                // The user's message is committed before the model is called.
                self.created = true;
                self.stopped = true;
                if let Some(run) = run {
                    let path = session_path(&self.id, &format!("/runs/{run}/cancel"));
                    // The run may have ended by itself meanwhile.
                    self.stopped = self.client.send(Method::POST, &path, None).await.is_err();
                }
                note("stopped; the partial answer is stored");
                Ok(None)
            }
        }
    }

    async fn run_command(&mut self, command: &str) -> anyhow::Result<NextPrompt> {
        match SlashCommand::parse(command)? {
            SlashCommand::Help => line(HELP)?,
            SlashCommand::Quit => return Ok(NextPrompt::Quit),
            SlashCommand::New => self.switch_to(SessionId::generate(), false),
            SlashCommand::History(count) => self.history(count).await?,
            SlashCommand::Sessions => self.sessions().await?,
            SlashCommand::Switch(id) => self.switch(id).await?,
            SlashCommand::Models => self.models().await?,
            SlashCommand::Model(name) => {
                note(format!("the next answer is by {name}"));
                self.model = Some(name.to_owned());
            }
            SlashCommand::Fork(position) => self.fork(position).await?,
            SlashCommand::Undo(turns) => {
                let rewound = undo_turns(&self.client, self.id.as_str(), turns).await?;
                line(rewound_text(self.id.as_str(), &rewound))?;
            }
            SlashCommand::Rewind(position) => self.rewind(position).await?,
            SlashCommand::Checkpoints => self.checkpoints().await?,
            SlashCommand::Checkpoint(label) => self.checkpoint(label).await?,
            SlashCommand::Compact(keep_turns) => self.compact(keep_turns).await?,
            SlashCommand::Title(title) => self.title(title).await?,
        }
        Ok(NextPrompt::Continue)
    }

    async fn history(&self, count: usize) -> anyhow::Result<()> {
        let messages = recent(&self.client, &self.id, count).await?.unwrap_or_default();
        Ok(print(messages.iter().map(output::format_message).collect::<String>())?)
    }

    async fn sessions(&self) -> anyhow::Result<()> {
        let (sessions, _) =
            PageStream::new(&self.client, "/sessions", &[("include", "display_title")], 20).all().await?;
        Ok(print(sessions_table(&sessions, false))?)
    }

    async fn switch(&mut self, id_part: &str) -> anyhow::Result<()> {
        let id = self.client.resolve(id_part).await?;
        let Some(last) = recent(&self.client, &id, 2).await? else {
            bail!("there is no session {id}; /sessions lists them, /new creates one");
        };
        self.switch_to(id, true);
        Ok(print(last.iter().map(output::format_message).collect::<String>())?)
    }

    async fn models(&self) -> anyhow::Result<()> {
        let models: Value = self.client.get("/v1/models").await?;
        let names = models["data"].as_array().into_iter().flatten().map(|m| clean(field(m, "id")) + "\n");
        Ok(print(names.collect::<String>())?)
    }

    async fn fork(&mut self, position: Option<&str>) -> anyhow::Result<()> {
        self.ensure_created().await?;
        let forked = fork_at(&self.client, self.id.as_str(), position, None).await?;
        self.switch_to(SessionId::new(field(&forked, "id"))?, true);
        Ok(())
    }

    async fn rewind(&self, position: Value) -> anyhow::Result<()> {
        let path = session_path(&self.id, "/rewind");
        let rewound: Value = self.client.post(&path, &position).await?.json().await?;
        Ok(line(rewound_text(self.id.as_str(), &rewound))?)
    }

    async fn checkpoints(&mut self) -> anyhow::Result<()> {
        self.ensure_created().await?;
        let list: Value = self.client.get(&session_path(&self.id, "/checkpoints")).await?;
        Ok(print(checkpoints_table(list["data"].as_array().map(Vec::as_slice).unwrap_or_default()))?)
    }

    async fn checkpoint(&mut self, label: Option<&str>) -> anyhow::Result<()> {
        self.ensure_created().await?;
        let body = label.map_or(json!({}), |label| json!({"label": label}));
        let path = session_path(&self.id, "/checkpoints");
        let checkpoint: Value = self.client.post(&path, &body).await?.json().await?;
        Ok(line(clean(&format!(
            "checkpoint {} after message {}",
            field(&checkpoint, "label"),
            checkpoint["position"]
        )))?)
    }

    async fn compact(&self, keep_turns: Option<usize>) -> anyhow::Result<()> {
        let path = session_path(&self.id, "/compact");
        let compacted: Value = self.client.post(&path, &json!({"keep_turns": keep_turns})).await?.json().await?;
        Ok(line(compacted_text(&compacted))?)
    }

    async fn title(&mut self, title: &str) -> anyhow::Result<()> {
        self.ensure_created().await?;
        let body = json!({"title": title}).to_string();
        self.client.send(Method::PATCH, &session_path(&self.id, ""), Some(body)).await?;
        Ok(line(format!("the title is now {:?}", clean(title)))?)
    }

    fn switch_to(&mut self, id: SessionId, created: bool) {
        self.id = id;
        self.created = created;
        self.stopped = false;
        note(format!("{}session {}", if created { "" } else { "new " }, self.id));
    }

    /// Creates the session if it does not exist yet.
    async fn ensure_created(&mut self) -> anyhow::Result<()> {
        if !self.created {
            let mut body = json!({"id": self.id});
            if let Some(assistant) = &self.assistant {
                body["assistant_id"] = json!(assistant);
            }
            self.client.post("/sessions", &body).await?;
            self.created = true;
        }
        Ok(())
    }
}

/// Sends a request, prints the streamed answer, and returns the complete message. `run` is set as soon as the run's
/// id is known.
async fn receive_answer(client: &ApiClient, body: String, run: &mut Option<String>) -> anyhow::Result<Value> {
    let mut response = client.send(Method::POST, "/v1/chat/completions", Some(body)).await?;
    let mut events = SseDecoder::default();
    let mut answer = ModelAnswer::default();
    let mut complete = false;
    let mut printed = false;
    while let Some(part) = response.body.next().await {
        events.push(&part?).map_err(|reason| anyhow!(reason))?;
        while let Some(data) = events.next_event() {
            if data == "[DONE]" {
                complete = true;
                continue;
            }
            let chunk: Value = serde_json::from_str(&data)?;
            if let Some(id) = chunk["run_id"].as_str() {
                *run = Some(id.to_owned());
            }
            if let Some(reason) = chunk["error"]["message"].as_str() {
                bail!("the stream failed: {reason}");
            }
            if let Some(text) = chunk["choices"][0]["delta"]["content"].as_str().filter(|t| !t.is_empty()) {
                print(clean(text))?;
                printed = true;
            }
            answer.add_chunk(&ModelChunk::Chunk(data)).map_err(|reason| anyhow!(reason))?;
        }
    }
    if printed {
        line("")?;
    }
    if !complete {
        bail!("the stream ended early; the partial answer is stored");
    }
    Ok(answer.message().map_or(Value::Null, |m| m.to_value()))
}
