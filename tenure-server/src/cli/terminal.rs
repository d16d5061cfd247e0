//! Line input: with editing and history on a terminal, else line by line.

use reedline::{
    FileBackedHistory, History, HistoryItem, Prompt, PromptEditMode, PromptHistorySearch, PromptHistorySearchStatus,
    Reedline, Signal, ValidationResult, Validator,
};
use std::borrow::Cow;
use std::io::{self, BufRead, IsTerminal, Lines, StdinLock, Write};

/// Maximum number of lines in the input history.
const MAX_HISTORY: usize = 1000;

/// The source of input lines.
pub enum LineInput {
    /// A user at a terminal.
    Terminal(Box<Reedline>),
    /// A pipe or a file.
    Lines(Lines<StdinLock<'static>>),
}

/// The outcome of reading a line.
pub enum TerminalEvent {
    /// A line, or several joined by continuation.
    Line(String),
    /// Ctrl-C: the typed text is discarded.
    Interrupted,
    /// The end of the input.
    End,
}

impl LineInput {
    /// Opens standard input. `previous_lines` is the initial input history, which is kept in memory only.
    pub fn open(previous_lines: Vec<String>) -> Self {
        if !is_interactive() {
            return Self::Lines(io::stdin().lines());
        }
        let editor = Reedline::create().with_validator(Box::new(Backslash)).use_bracketed_paste(true);
        let editor = match FileBackedHistory::new(MAX_HISTORY) {
            Ok(mut history) => {
                for line in previous_lines {
                    let _ = history.save(HistoryItem::from_command_line(line));
                }
                editor.with_history(Box::new(history))
            }
            Err(_) => editor,
        };
        Self::Terminal(Box::new(editor))
    }

    /// Returns true if the input is a terminal.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// Reads a line, blocking. A line that ends with a backslash continues on the next.
    pub fn ask(&mut self, prompt: &str) -> anyhow::Result<TerminalEvent> {
        tokio::task::block_in_place(|| match self {
            Self::Terminal(editor) => Ok(match editor.read_line(&PromptAnswer(prompt))? {
                Signal::Success(line) => TerminalEvent::Line(line.replace("\\\n", "\n").replace("\\\r\n", "\n")),
                Signal::CtrlC => TerminalEvent::Interrupted,
                _ => TerminalEvent::End,
            }),
            Self::Lines(lines) => {
                let mut all: Option<String> = None;
                for line in lines.by_ref() {
                    let line = line?;
                    let (line, more) = line.strip_suffix('\\').map_or((&*line, false), |l| (l, true));
                    let so_far = all.get_or_insert_default();
                    so_far.push_str(line);
                    if !more {
                        break;
                    }
                    so_far.push('\n');
                }
                Ok(all.map_or(TerminalEvent::End, TerminalEvent::Line))
            }
        })
    }
}

/// Returns true if a user is at a terminal: it can be asked questions.
pub fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// Asks for confirmation. Returns true only for a yes.
pub fn confirm(question: &str) -> io::Result<bool> {
    write!(io::stderr(), "{question} [y/N] ")?;
    let mut answer = String::new();
    tokio::task::block_in_place(|| io::stdin().lock().read_line(&mut answer))?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}

/// A validator that treats a line ending with a backslash as incomplete.
struct Backslash;

impl Validator for Backslash {
    fn validate(&self, line: &str) -> ValidationResult {
        if line.ends_with('\\') { ValidationResult::Incomplete } else { ValidationResult::Complete }
    }
}

struct PromptAnswer<'a>(&'a str);

impl Prompt for PromptAnswer<'_> {
    fn render_prompt_left(&self) -> Cow<'_, str> {
        Cow::Borrowed(self.0)
    }

    fn render_prompt_right(&self) -> Cow<'_, str> {
        Cow::Borrowed("")
    }

    fn render_prompt_indicator(&self, _: PromptEditMode) -> Cow<'_, str> {
        Cow::Borrowed("> ")
    }

    fn render_prompt_multiline_indicator(&self) -> Cow<'_, str> {
        Cow::Borrowed("… ")
    }

    fn render_prompt_history_search_indicator(&self, search: PromptHistorySearch) -> Cow<'_, str> {
        let state = match search.status {
            PromptHistorySearchStatus::Passing => "found",
            PromptHistorySearchStatus::Failing => "not found",
        };
        Cow::Owned(format!("({state}: {}) ", search.term))
    }
}
