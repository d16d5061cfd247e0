//! Retired terms stay retired. Earlier versions had a vocabulary of their own (metaphors, pronouns and bare participles
//! as names); the lists below name each such term and the standard term to use instead.
//!
//! Checked are all sources and documents of the repository: names (of functions, fields, types, variants, constants,
//! modules, files, tables and columns) and prose (comments and documents). String literals are not checked, except
//! through the names of what they refer to: messages, test data and serialized names may use any word.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::Path;

/// Retired as part of a name and as a word in prose: terms, and what to use instead.
const EVERYWHERE: &[(&str, &str)] = &[
    ("shelf,shelves", "namespace"),
    ("card,cards", "head"),
    ("bell,bells", "notifier"),
    ("scribe,scribes", "writer"),
    ("seat,seats,seated", "slot"),
    ("errand,errands", "job, task"),
    ("rack,racks", "pool, table: what it contains"),
    ("glance,glances,glanced", "head_if_changed, check"),
    ("gate,gates,gated", "lock, semaphore, check"),
    ("house,houses", "inner, state: what it contains"),
    ("heir,heirs", "inheriting fork"),
    ("estate,estates", "inheritance"),
    ("bequeath,bequeathed,bequeaths,bequest", "inherit"),
    ("homeless", "orphaned, without a session"),
    ("rummage,rummages", "scan, search"),
    ("hunt,hunts,hunting", "scan, search"),
    ("needle,needles", "matcher, phrase"),
    ("upkeep", "maintenance"),
    ("spliced,splicing", "reconciled, merged"),
    ("wipe,wipes,wiped,wiping", "scrub, overwrite"),
    ("rubbish", "invalid data"),
    ("census", "counts"),
    ("tally,tallies", "stats"),
    ("undream", "undo_dream"),
    ("somebody,nobody", "the client, user, process or caller that is meant"),
];

/// Retired as part of a name.
const IN_NAMES: &[(&str, &str)] = &[
    ("hands", "executors"),
    ("mind,minds", "memory_target"),
    ("talk,talks", "conversation, messages"),
    ("said,say", "message, answer, respond"),
    ("told,tell,tells", "notified, notify, injected, report"),
    ("hear,hears,heard", "receive, received, event"),
    ("who,whom", "principal, user, caller"),
    ("why", "reason"),
    ("mend,mends,mended", "repair, repaired"),
    ("lean,leans", "parent, inherits_from"),
    ("hot,warm", "cache, cached, loaded"),
    ("judge,judges", "decide, check"),
    ("odd", "invalid, unusual"),
    ("maker,makers", "what it creates: tool_call_future, factory"),
    ("moment,moments", "time, generation"),
    ("door,doors", "connection, server: what it tests"),
    ("kit", "support, harness"),
    ("places", "support, homes: what it contains"),
    ("world", "state, environment"),
    ("anybody,everybody", "the client, user, process or caller that is meant"),
];

/// Retired as a whole name: in longer names, such as those of tests, they are plain English.
const AS_NAMES: &[(&str, &str)] = &[
    ("what,which,how,them,they", "a noun that says what it is"),
    ("when", "a noun: time, phase, condition"),
    ("ours,theirs,mine,others", "a noun with an adjective: own_records, other_sessions"),
    ("whose", "owner, owner_filter"),
    ("says", "message, answer, reports"),
    ("kept", "stored, retained, remaining"),
    ("asked", "requested, model_calls, question"),
    ("made", "created"),
    ("meant", "intended, target"),
    ("begun,began", "started"),
    ("cut,cuts", "truncated, rewound_to, blob_refs, discarded"),
    ("lead", "instructions"),
    ("place", "position, location"),
    ("asking,making", "what it is for: list_errors, create_errors"),
];

/// Retired in prose, as a sequence of words.
const IN_PROSE: &[(&str, &str)] = &[
    ("goes on,go on,went on", "continues"),
    ("so many", "at most N, the number of"),
    ("cut off", "discarded, truncated, interrupted, disconnected"),
    ("what was said", "the messages"),
    ("is told,are told,was told", "is notified, receives"),
];

/// Names that are defined by others.
const ALLOWED_NAMES: &[(&str, &str)] = &[("run_upkeep", "a method of metrics-exporter-prometheus")];

/// Serialized names, which are stable. Comments and documents may mention them as code; names in sources differ, with
/// `#[serde(rename)]`.
const SERIALIZED: &[(&str, &str)] = &[
    ("spliced", "merge report of a chat response"),
    ("cut", "page of search results"),
    ("place", "path of checkpoints; location in a finding or an import"),
    ("when", "condition of a review rule"),
    ("why", "first broken record of an audit trail"),
    ("lead", "message in a log"),
    ("cuts", "media of a message in a log"),
    ("what", "label of metrics"),
    ("tenure_hot_sessions_total", "metric"),
    ("charge_card", "tool of the demo"),
];

/// Files (by the beginning of their path) in which terms are allowed, and the reason. Exceptions that are not needed any
/// more are reported.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("tenure/migrations/", "when", "a keyword of SQL"),
    ("scripts/record-demo.py", "card", "a payment card"),
    ("tenure-server/tests/clients/cases.py", "which", "a function of Python's shutil"),
];

/// Directories with data: recorded traffic, stored formats, inputs of fuzz targets.
const NOT_SOURCES: [&str; 6] = ["fixtures", "data", "corpus", "target", "node_modules", "__pycache__"];

/// Files that tell history, or list the terms.
const NOT_CHECKED: [&str; 3] = ["CHANGELOG.md", "docs/decisions.md", "tenure/tests/vocabulary.rs"];

#[test]
fn retired_terms_are_not_used() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files: Vec<String> = entries(&root).into_iter().filter(|name| name.ends_with(".md")).collect();
    for directory in ["docs", "scripts", "fuzz", "tenure", "tenure-server"] {
        collect(&root, directory, &mut files);
    }
    assert!(files.len() > 400, "sources of both crates are found: {}", files.len());
    let mut report = Vec::new();
    let mut used = BTreeSet::new();
    for path in files.iter().filter(|path| !NOT_CHECKED.contains(&path.as_str())) {
        let text = fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        for violation in violations(path, &text) {
            match exception(path, &violation.term) {
                Some(index) => {
                    used.insert((index, violation.term));
                }
                None => report.push(violation.to_string()),
            }
        }
    }
    for (index, (path, terms, _)) in EXCEPTIONS.iter().enumerate() {
        let unused = terms.split(',').filter(|term| !used.contains(&(index, (*term).to_owned())));
        report.extend(unused.map(|term| format!("{path}: the exception for `{term}` is not needed: remove it")));
    }
    assert!(report.is_empty(), "{} violation(s)\n\n{}\n", report.len(), report.join("\n"));
}

fn exception(path: &str, term: &str) -> Option<usize> {
    EXCEPTIONS.iter().position(|(prefix, terms, _)| path.starts_with(prefix) && terms.split(',').any(|t| t == term))
}

/// The names in a directory, sorted.
fn entries(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Adds the sources and documents below a directory, as paths relative to the root.
fn collect(root: &Path, directory: &str, files: &mut Vec<String>) {
    for name in entries(&root.join(directory)) {
        let path = format!("{directory}/{name}");
        if root.join(&path).is_dir() {
            if !name.starts_with('.') && !NOT_SOURCES.contains(&name.as_str()) {
                collect(root, &path, files);
            }
        } else if extension(&name) == "sh" || extension(&name) == "md" || Syntax::of(extension(&name)).is_some() {
            files.push(path);
        }
    }
}

fn extension(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or_default()
}

/// A retired term in a file.
#[derive(Debug)]
struct Violation {
    path: String,
    line: usize,
    /// The name or word that contains the term.
    name: String,
    term: String,
    instead: &'static str,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, line, name, term, instead } = self;
        write!(f, "{path}:{line}: `{name}`: `{term}` is retired; use instead: {instead}")
    }
}

/// The retired terms in the path and the text of a file.
fn violations(path: &str, text: &str) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut add = |line: usize, found: Vec<(String, String, &'static str)>| {
        violations.extend(found.into_iter().map(|(name, term, instead)| Violation {
            path: path.to_owned(),
            line,
            name,
            term,
            instead,
        }));
    };
    for component in path.split('/') {
        add(1, in_name(component));
    }
    let items = match (extension(path), Syntax::of(extension(path))) {
        (_, Some(syntax)) => source(text, &syntax),
        ("sh", None) => shell(text),
        _ => markdown(text),
    };
    for item in items {
        match item {
            Item::Name(line, name) => add(line, in_name(name)),
            Item::Prose(line, prose) => add(line, in_prose(prose)),
        }
    }
    violations
}

/// What to use instead of a term, if a list contains it.
fn lookup(list: &[(&'static str, &'static str)], term: &str) -> Option<&'static str> {
    list.iter().find(|(terms, _)| terms.split(',').any(|t| t == term)).map(|(_, instead)| *instead)
}

fn contains(list: &[(&str, &str)], name: &str) -> bool {
    list.iter().any(|(listed, _)| *listed == name)
}

/// The retired terms in a name, with what to use instead.
fn in_name(name: &str) -> Vec<(String, String, &'static str)> {
    if contains(ALLOWED_NAMES, name) {
        return Vec::new();
    }
    let mut found = Vec::new();
    for part in parts(name) {
        if let Some(instead) = lookup(EVERYWHERE, &part).or_else(|| lookup(IN_NAMES, &part)) {
            found.push((name.to_owned(), part, instead));
        }
    }
    let whole = name.to_lowercase();
    if let Some(instead) = lookup(AS_NAMES, &whole) {
        found.push((name.to_owned(), whole, instead));
    }
    found
}

/// The retired terms in a line of prose. Code in backticks consists of names.
fn in_prose(line: &str) -> Vec<(String, String, &'static str)> {
    let mut found = Vec::new();
    let spans: Vec<&str> = line.split('`').collect();
    for (index, span) in spans.iter().enumerate() {
        let words: Vec<&str> = span.split(|c| !is_word(c)).filter(|word| !word.is_empty()).collect();
        let is_code = index % 2 == 1 && index + 1 < spans.len();
        if is_code {
            found.extend(words.iter().filter(|word| !contains(SERIALIZED, word)).flat_map(|word| in_name(word)));
            continue;
        }
        for word in &words {
            let terms = parts(word).into_iter();
            found.extend(terms.filter_map(|term| Some(((*word).to_owned(), term.clone(), lookup(EVERYWHERE, &term)?))));
        }
        let sentence = format!(" {} ", words.join(" ").to_lowercase());
        for (phrases, instead) in IN_PROSE {
            let phrases = phrases.split(',').filter(|phrase| sentence.contains(&format!(" {phrase} ")));
            found.extend(phrases.map(|phrase| (phrase.to_owned(), phrase.to_owned(), *instead)));
        }
    }
    found
}

/// The parts of a name in lower case: `item_shelf`, `itemShelf`, `ItemShelf` and `ITEM_SHELF` are `item`, `shelf`.
fn parts(name: &str) -> Vec<String> {
    let chars: Vec<char> = name.chars().collect();
    let mut parts = Vec::new();
    let mut part = String::new();
    for (i, c) in chars.iter().enumerate() {
        let follows_lower = i > 0 && !chars[i - 1].is_uppercase();
        let precedes_lower = chars.get(i + 1).is_some_and(|next| next.is_lowercase());
        let begins = c.is_uppercase() && (follows_lower || precedes_lower);
        if (begins || !c.is_alphanumeric()) && !part.is_empty() {
            parts.push(std::mem::take(&mut part));
        }
        if c.is_alphanumeric() {
            part.extend(c.to_lowercase());
        }
    }
    if !part.is_empty() {
        parts.push(part);
    }
    parts
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// A part of a file, with its line number.
enum Item<'a> {
    Name(usize, &'a str),
    Prose(usize, &'a str),
}

impl Item<'_> {
    /// The same item on another line.
    fn at(self, line: usize) -> Self {
        match self {
            Self::Name(_, name) => Self::Name(line, name),
            Self::Prose(_, prose) => Self::Prose(line, prose),
        }
    }
}

/// What separates names, comments and literals in a language.
struct Syntax {
    line_comment: &'static str,
    /// Comments between `/*` and `*/`.
    has_block_comments: bool,
    quotes: &'static str,
    /// A backslash escapes the next character of a literal.
    has_escapes: bool,
    /// Texts in three double quotes are documentation.
    has_docstrings: bool,
    /// Raw strings, and lifetimes, which are no literals.
    is_rust: bool,
}

impl Syntax {
    fn of(extension: &str) -> Option<Self> {
        let c_like = Self {
            line_comment: "//",
            has_block_comments: true,
            quotes: "\"",
            has_escapes: true,
            has_docstrings: false,
            is_rust: false,
        };
        match extension {
            "rs" => Some(Self { is_rust: true, ..c_like }),
            "mjs" => Some(Self { quotes: "\"'`", ..c_like }),
            "py" => Some(Self {
                line_comment: "#",
                has_block_comments: false,
                quotes: "\"'",
                has_docstrings: true,
                ..c_like
            }),
            "sql" => Some(Self { line_comment: "--", quotes: "'", has_escapes: false, ..c_like }),
            _ => None,
        }
    }

    /// The length of the comment at the beginning of a text.
    fn comment(&self, text: &str) -> Option<usize> {
        if text.starts_with(self.line_comment) {
            return Some(text.find('\n').unwrap_or(text.len()));
        }
        let delimited = |open: &str, close: &str| {
            let body = text.strip_prefix(open)?;
            Some(body.find(close).map_or(text.len(), |end| open.len() + end + close.len()))
        };
        let block = if self.has_block_comments { delimited("/*", "*/") } else { None };
        block.or_else(|| if self.has_docstrings { delimited("\"\"\"", "\"\"\"") } else { None })
    }

    /// The length of the literal at the beginning of a text.
    fn literal(&self, text: &str) -> Option<usize> {
        if self.is_rust {
            if let Some(length) = raw_string(text) {
                return Some(length);
            }
            if let Some(rest) = text.strip_prefix('\'') {
                return Some(1 + character(rest));
            }
        }
        let quote = text.chars().next().filter(|c| self.quotes.contains(*c))?;
        let mut is_escaped = false;
        for (index, c) in text.char_indices().skip(1) {
            if is_escaped {
                is_escaped = false;
            } else if c == quote {
                return Some(index + c.len_utf8());
            } else {
                is_escaped = self.has_escapes && c == '\\';
            }
        }
        Some(text.len())
    }
}

/// The length of the raw string at the beginning of a text.
fn raw_string(text: &str) -> Option<usize> {
    let rest = text.strip_prefix("br").or_else(|| text.strip_prefix('r'))?;
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    let body = rest[hashes..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    let end = body.find(&close).map_or(body.len(), |end| end + close.len());
    Some(text.len() - body.len() + end)
}

/// The length of a character after its opening quote, including the closing one. A lifetime has none: 0.
fn character(text: &str) -> usize {
    let mut chars = text.char_indices();
    match chars.next() {
        Some((_, '\\')) => {
            chars.next();
            chars.find(|(_, c)| *c == '\'').map_or(text.len(), |(index, _)| index + 1)
        }
        Some(_) => chars.next().filter(|(_, c)| *c == '\'').map_or(0, |(index, _)| index + 1),
        None => 0,
    }
}

/// The names and the lines of comments of a source file.
fn source<'a>(text: &'a str, syntax: &Syntax) -> Vec<Item<'a>> {
    let mut items = Vec::new();
    let mut line = 1;
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = if let Some(length) = syntax.comment(rest) {
            items.extend(rest[..length].lines().enumerate().map(|(index, prose)| Item::Prose(line + index, prose)));
            length
        } else if let Some(length) = syntax.literal(rest) {
            length
        } else if is_word(first) {
            let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            items.push(Item::Name(line, &rest[..length]));
            length
        } else {
            first.len_utf8()
        };
        line += rest[..length].matches('\n').count();
        rest = &rest[length..];
    }
    items
}

/// The comments of a shell script, and the names of its functions and variables.
fn shell(text: &str) -> Vec<Item<'_>> {
    let mut items = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let code = line.trim_start();
        if code.starts_with('#') {
            items.push(Item::Prose(index + 1, code));
            continue;
        }
        if let Some((_, comment)) = line.split_once(" # ") {
            items.push(Item::Prose(index + 1, comment));
        }
        let (name, rest) = code.split_at(code.find(|c| !is_word(c)).unwrap_or(code.len()));
        if rest.starts_with("()") || rest.starts_with('=') {
            items.push(Item::Name(index + 1, name));
        }
    }
    items
}

/// The lines of a document. Fenced blocks are left out, because they show requests, responses and output; Rust in them
/// consists of names.
fn markdown(text: &str) -> Vec<Item<'_>> {
    let rust = Syntax::of("rs").unwrap();
    let mut items = Vec::new();
    let mut fence = None;
    for (index, line) in text.lines().enumerate() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            fence = if fence.is_none() { Some(language) } else { None };
            continue;
        }
        match fence {
            None => items.push(Item::Prose(index + 1, line)),
            Some(language) if language.starts_with("rust") => {
                items.extend(source(line, &rust).into_iter().map(|item| item.at(index + 1)));
            }
            Some(_) => {}
        }
    }
    items
}

/// A check that never complained proves nothing: planted violations.
mod planted {
    use super::*;

    /// Line and term of each violation.
    fn found(path: &str, text: &str) -> Vec<(usize, String)> {
        violations(path, text).into_iter().map(|violation| (violation.line, violation.term)).collect()
    }

    fn terms(path: &str, text: &str) -> Vec<String> {
        found(path, text).into_iter().map(|(_, term)| term).collect()
    }

    #[test]
    fn names_are_split() {
        assert_eq!(parts("read_shelfItem"), ["read", "shelf", "item"]);
        assert_eq!(parts("HTTPShelf2"), ["http", "shelf2"]);
        assert_eq!(parts("MAX_CARDS"), ["max", "cards"]);
        assert_eq!(parts("_r#type"), ["r", "type"]);
    }

    #[test]
    fn a_term_is_found_in_every_kind_of_name() {
        for text in ["fn of_shelf() {}", "struct ShelfKey;", "const SHELF: u8 = 1;", "let a = b.shelf;", "mod shelf;"] {
            assert_eq!(found("a.rs", &format!("\n{text}")), [(2, "shelf".to_owned())], "{text}");
        }
        assert_eq!(terms("src/shelves.rs", ""), ["shelves"]);
        assert_eq!(terms("src/index_cards/mod.rs", ""), ["cards"]);
        assert_eq!(terms("a.sql", "create table item (shelf text, head_json text);"), ["shelf"]);
        assert_eq!(terms("a.py", "def say(x):\n    return x"), ["say"]);
        assert_eq!(terms("a.mjs", "const toldThem = 1"), ["told"]);
        assert_eq!(terms("a.sh", "say() { echo \"$*\"; }\nsay hello\ntold=1"), ["say", "told"]);
    }

    #[test]
    fn a_violation_names_file_line_and_remedy() {
        let all = violations("src/a.rs", "\nfn shelf_of() {}");
        let want = "src/a.rs:2: `shelf_of`: `shelf` is retired; use instead: namespace";
        assert_eq!(all.iter().map(ToString::to_string).collect::<Vec<_>>(), [want]);
    }

    #[test]
    fn whole_names_are_distinguished_from_parts() {
        assert_eq!(terms("a.rs", "let what = which(how);"), ["what", "which", "how"]);
        assert_eq!(terms("a.rs", "fn views_show_what_the_fold_shows() {}"), [""; 0]);
        assert_eq!(terms("a.rs", "struct Kept; enum E { Cut }"), ["kept", "cut"]);
    }

    #[test]
    fn a_term_is_found_in_prose() {
        for text in ["// a shelf", "/// A Shelf.", "//! the `shelf`", "/* one\nshelf */", "let a = 1; // shelf"] {
            assert_eq!(terms("a.rs", text), ["shelf"], "{text}");
        }
        assert_eq!(found("a.md", "# A\n\nof the shelf's items"), [(3, "shelf".to_owned())]);
        assert_eq!(terms("a.sql", "-- items on shelves"), ["shelves"]);
        assert_eq!(terms("a.sh", "# items on shelves\nx # a card"), ["shelves", "card"]);
        assert_eq!(terms("a.py", "\"\"\"Items\non shelves.\"\"\"\nx = 1  # a card"), ["shelves", "card"]);
        assert_eq!(terms("a.md", "The run goes on.\nIt goes\non."), ["goes on"]);
    }

    #[test]
    fn terms_of_names_are_plain_words_in_prose() {
        assert_eq!(terms("a.md", "The error says why; `say` and `Kept` are names."), ["say", "kept"]);
        assert_eq!(terms("a.rs", "// who asked, and what was kept"), [""; 0]);
        assert_eq!(terms("a.rs", "// an odd ` alone: said"), [""; 0]);
    }

    #[test]
    fn literals_and_examples_are_ignored() {
        for text in [
            "f(\"shelf\")",
            "f(\"\\\"shelf\")",
            "f(r\"\\\", 1); g(\"shelf\")",
            "f(r#\"a \"shelf\"#)",
            "f(br#\"shelf\"#)",
            "f('\\'', \"shelf\")",
            "f('\"', '\"'); let a: &'static str = \"shelf\";",
        ] {
            assert_eq!(terms("a.rs", text), [""; 0], "{text}");
        }
        assert_eq!(terms("a.sql", "select '\\', 'shelf'"), [""; 0]);
        assert_eq!(terms("a.py", "f('shelf', \"it's a shelf\")"), [""; 0]);
        let blocks = "```console\nshelf\n```\n```rust\nf(\"card\");\nlet shelf = 1; // what it is\n```";
        assert_eq!(found("a.md", blocks), [(6, "shelf".to_owned())]);
        assert_eq!(terms("a.rs", "// `spliced`\nh.run_upkeep()"), [""; 0], "names that are allowed");
        assert_eq!(terms("a.rs", "// spliced\nlet spliced = 1;"), ["spliced", "spliced"], "serialized names as words");
        assert_eq!(terms("a.rs", "gateway(bookshelf, placard)"), [""; 0], "other words");
    }

    #[test]
    fn names_after_literals_are_found() {
        for text in ["\"a\"; shelf", "r#\"a\"#; shelf", "'a'; shelf", "'\\n'; shelf", "fn f<'a>(shelf: &'a str) {}"] {
            assert_eq!(terms("a.rs", text), ["shelf"], "{text}");
        }
    }

    #[test]
    fn lists_are_consistent() {
        let mut seen = BTreeSet::new();
        for (terms, instead) in [EVERYWHERE, IN_NAMES, AS_NAMES, IN_PROSE].concat() {
            assert!(!instead.is_empty());
            for term in terms.split(',') {
                assert!(seen.insert(term), "{term} is listed twice");
                assert_eq!(term, term.trim().to_lowercase());
            }
        }
    }
}
