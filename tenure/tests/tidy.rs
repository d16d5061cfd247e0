//! Project rules that neither the compiler nor clippy checks. Each violation names file, line, rule and remedy.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};

/// Rules are pure decisions: waiting, time and storage are left to their callers.
const NOT_IN_RULES: [&str; 6] = ["async", "Store", "now(", "std::fs", "fs::", "tokio"];

/// Types are data and its validation.
const NOT_IN_TYPES: [&str; 3] = ["tokio", "async fn", "Store"];

const MAX_LINES: usize = 700;

/// Names at the crate root: 40 items and 13 modules. A user of the library sees them first, so a new item belongs
/// into a module, or replaces another one here.
const MAX_PUBLIC_NAMES: usize = 53;

/// Documents name files relative to the repository, a crate, its sources or its tests.
const FILE_ROOTS: [&str; 7] =
    ["", "tenure", "tenure/src", "tenure/tests", "tenure/tests/it", "tenure-server", "tenure-server/src"];

const CONSTRUCTED_ONCE: [&str; 2] = ["Workspaces::new(", "Toolbox::new("];

const UNFINISHED: [&str; 5] = ["todo!(", "unimplemented!(", "FIXME", "XXX", "#[ignore"];
const NOT_A_DEPENDENCY: [&str; 5] = ["axum", "reqwest", "clap", "pyo3", "hyper"];

#[test]
fn rules_are_pure() {
    let files = files_under(&package().join("src/rules"), "rs");
    assert!(files.len() > 15, "the rules are in src/rules");
    report(&files.iter().flat_map(|path| pure_rules(&name(path), &read(path))).collect::<Vec<_>>());
}

#[test]
fn types_are_data() {
    let files = files_under(&package().join("src/types"), "rs");
    assert!(files.len() > 15, "the types are in src/types");
    report(&files.iter().flat_map(|path| plain_types(&name(path), &read(path))).collect::<Vec<_>>());
}

#[test]
fn source_files_are_short() {
    let files = in_all_crates("src");
    report(&files.iter().flat_map(|path| short(&name(path), &read(path))).collect::<Vec<_>>());
}

#[test]
fn both_dialects_have_the_same_migrations() {
    let names = |dialect: &str| -> Vec<String> {
        let paths = files_under(&package().join("migrations").join(dialect), "sql");
        paths.iter().filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect()
    };
    report(&migrations(&names("sqlite"), &names("postgres")));
}

#[test]
fn nothing_is_left_unfinished() {
    let mut files = in_all_crates("src");
    files.extend(in_all_crates("tests"));
    files.extend(in_all_crates("benches"));
    // `make failover` runs the tests that are ignored there: they need three database servers.
    files.retain(|path| !path.ends_with("tests/tidy.rs") && !path.ends_with("tests/it/failover.rs"));
    report(&files.iter().flat_map(|path| finished(&name(path), &read(path))).collect::<Vec<_>>());
}

#[test]
fn markdown_is_clean_and_its_links_lead_somewhere() {
    let root = package().join("..");
    let mut files = files_in(&root, "md");
    files.extend(files_under(&root.join("docs"), "md"));
    let check = |path: &PathBuf| {
        let directory = path.parent().unwrap_or(&root);
        markdown(&name(path), &read(path), |link| directory.join(link).exists())
    };
    report(&files.iter().flat_map(check).collect::<Vec<_>>());
}

#[test]
fn tests_that_documents_name_exist() {
    let root = package().join("..");
    let mut files = files_in(&root, "md");
    files.extend(files_under(&root.join("docs"), "md"));
    let check = |path: &PathBuf| {
        named_tests(&name(path), &read(path), |file| fs::read_to_string(root.join(file)).unwrap_or_default())
    };
    report(&files.iter().flat_map(check).collect::<Vec<_>>());
}

/// Every claim of docs/seeds.md that holds names a test, and the counts in its table are those of its rows.
#[test]
fn claims_of_the_seeds_name_tests() {
    report(&seed_claims("docs/seeds.md", &read(&package().join("../docs/seeds.md"))));
}

#[test]
fn files_that_documents_name_exist() {
    let root = package().join("..");
    let exists = |file: &str| FILE_ROOTS.iter().any(|directory| root.join(directory).join(file).exists());
    let check = |document: &&str| named_files(document, &read(&root.join(document)), exists);
    report(&["ARCHITECTURE.md", "CONTRIBUTING.md"].iter().flat_map(check).collect::<Vec<_>>());
}

#[test]
fn the_public_api_is_small() {
    report(&public_names("src/lib.rs", &read(&package().join("src/lib.rs"))));
}

/// State that belongs to the server as a whole is constructed once: a second instance would have its own state.
#[test]
fn shared_state_is_constructed_once() {
    let sources: Vec<_> = in_all_crates("src").iter().map(|path| (name(path), read(path))).collect();
    let complaints = CONSTRUCTED_ONCE.iter().flat_map(|constructor| constructed_once(constructor, &sources));
    report(&complaints.collect::<Vec<_>>());
}

/// Tests wait for events and conditions, never for time to pass: see [`sleeps`].
#[test]
fn tests_do_not_sleep_to_wait_for_something() {
    let files = in_all_crates("tests/it");
    assert!(files.len() > 50, "the tests are in tests/it");
    report(&files.iter().flat_map(|path| sleeps(&name(path), &read(path))).collect::<Vec<_>>());
}

#[test]
fn every_conformance_test_is_run() {
    let list = package().join("src/conformance.rs");
    let topics = files_under(&package().join("src/conformance"), "rs");
    let check = |path: &PathBuf| conformance(&name(path), &read(path), &read(&list));
    report(&topics.iter().flat_map(check).collect::<Vec<_>>());
}

#[test]
fn the_library_knows_neither_http_nor_cli_nor_python() {
    report(&dependencies("Cargo.toml", &read(&package().join("Cargo.toml"))));
}

// The rules, as functions of text, so that they can be tested themselves.

fn pure_rules(name: &str, text: &str) -> Vec<String> {
    let remedy =
        "rules are pure: take what is needed as a parameter, or move this to the operation that calls the rule";
    forbid(name, code(text), &NOT_IN_RULES, remedy)
}

fn plain_types(name: &str, text: &str) -> Vec<String> {
    forbid(name, code(text), &NOT_IN_TYPES, "types are data: move this to the contract or to an operation")
}

fn finished(name: &str, text: &str) -> Vec<String> {
    // Comments are included: they are where unfinished work hides.
    forbid(
        name,
        lines(text),
        &UNFINISHED,
        "nothing is left unfinished: finish it, or leave it out and say so in the docs",
    )
}

fn short(name: &str, text: &str) -> Vec<String> {
    let count = text.lines().count();
    let long = count > MAX_LINES;
    long.then(|| format!("{name}:{count}: files have at most {MAX_LINES} lines: split it along a noun"))
        .into_iter()
        .collect()
}

fn migrations(sqlite: &[String], postgres: &[String]) -> Vec<String> {
    let mut complaints = Vec::new();
    for (dialect, other_dialect, names, other_names) in
        [("sqlite", "postgres", sqlite, postgres), ("postgres", "sqlite", postgres, sqlite)]
    {
        for (index, name) in names.iter().enumerate() {
            let number = format!("{:04}_", index + 1);
            if !name.starts_with(&number) {
                complaints.push(format!(
                    "migrations/{dialect}/{name}:1: migrations count 0001, 0002, … without a hole: this one should start with {number}"
                ));
            }
            if !other_names.contains(name) {
                complaints.push(format!(
                    "migrations/{dialect}/{name}:1: both dialects have the same migrations: write migrations/{other_dialect}/{name}"
                ));
            }
        }
    }
    complaints
}

fn markdown(name: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut fenced = false;
    for (number, line) in lines(text) {
        if line.trim_end() != line {
            complaints.push(format!("{name}:{number}: no trailing whitespace: remove it"));
        }
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        // Inline code is excluded: in it, `a[0](b)` is not a link.
        let prose: String = line.split('`').step_by(2).collect();
        for link in prose.split("](").skip(1).filter_map(|rest| rest.split([')', ' ', '#']).next()) {
            let is_external = link.is_empty() || link.contains("://") || link.starts_with("mailto:");
            if !is_external && !exists(link) {
                complaints.push(format!(
                    "{name}:{number}: relative links lead to a file: {link} does not exist, correct the path"
                ));
            }
        }
    }
    complaints
}

/// Documents name a test as `path/to/file.rs::name`.
fn named_tests(name: &str, text: &str, source: impl Fn(&str) -> String) -> Vec<String> {
    let mut complaints = Vec::new();
    for (number, line) in lines(text) {
        for quoted in line.split('`').skip(1).step_by(2) {
            let Some((file, test)) = quoted.split_once(".rs::") else { continue };
            if !source(&format!("{file}.rs")).contains(&format!("fn {test}(")) {
                complaints.push(format!("{name}:{number}: there is no test {quoted}; name one that exists"));
            }
        }
    }
    complaints
}

/// A claim is a row `| 000-1 | claim | ✓ | tests |`; the row `| all | claims | ✓ | ≠ | open |` counts them.
fn seed_claims(name: &str, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut counts = [0; 3];
    let mut stated = Vec::new();
    for (number, line) in lines(text) {
        let cells: Vec<&str> = line.split(" | ").map(|cell| cell.trim_matches(['|', ' '])).collect();
        if cells.first() == Some(&"all") {
            stated = cells[1..].iter().filter_map(|cell| cell.parse::<usize>().ok()).collect();
        }
        let &[id, _, mark, ref evidence @ ..] = &cells[..] else { continue };
        if !id.split_once('-').is_some_and(|(document, n)| document.len() == 3 && n.parse::<u32>().is_ok()) {
            continue;
        }
        let evidence = evidence.join(" | ");
        let names_test = evidence.contains(".rs::") || evidence.contains(".py");
        match mark {
            "✓" if names_test => counts[0] += 1,
            "≠" if !evidence.is_empty() => counts[1] += 1,
            "open" if !evidence.is_empty() => counts[2] += 1,
            "✓" => complaints.push(format!("{name}:{number}: {id} names no test that demonstrates it")),
            _ => complaints.push(format!("{name}:{number}: {id} needs a mark (✓, ≠ or open) and a reason")),
        }
    }
    let expected = [counts.iter().sum(), counts[0], counts[1], counts[2]];
    if complaints.is_empty() && stated != expected {
        complaints.push(format!("{name}:1: the row `all` must be {expected:?}"));
    }
    complaints
}

/// Documents name files and directories in backquotes: `engine/write.rs`, `tenure/tests/it/`. A name with a
/// placeholder in capitals (`store/NAME.rs`) or with alternatives in braces is no file.
fn named_files(name: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut fenced = false;
    for (number, line) in lines(text) {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        for quoted in line.split('`').skip(1).step_by(2) {
            let file = quoted.split("::").next().unwrap_or(quoted);
            let stem = file.rsplit('/').next().and_then(|last| last.split('.').next()).unwrap_or(file);
            let has_placeholder = file.contains([' ', '{', '*', '…'])
                || stem.split('_').any(|word| word.len() > 1 && word == word.to_uppercase());
            let is_file = [".rs", ".toml", ".sh", ".py", ".yaml"].iter().any(|extension| file.ends_with(extension));
            let is_directory = file.ends_with('/') && !file.starts_with('/');
            if (is_file || is_directory) && !has_placeholder && !exists(file) {
                complaints.push(format!("{name}:{number}: there is no file {file}; name one that exists"));
            }
        }
    }
    complaints
}

/// Counts the names of `pub use` and `pub mod` at the crate root. Items of modules are indented, and do not count.
fn public_names(name: &str, text: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut statement = String::new();
    for (_, line) in code(text) {
        if statement.is_empty() && !line.starts_with("pub ") {
            continue;
        }
        statement.push_str(line);
        if statement.ends_with([';', '{']) && !statement.ends_with("::{") {
            let item = statement.trim_end_matches([';', '{', '}', ' ', ',']);
            let list = item.rsplit(['{', ':', ' ']).next().unwrap_or_default();
            let listed = item.split_once('{').map_or(list, |(_, listed)| listed);
            names.extend(listed.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()));
            statement.clear();
        }
    }
    if names.len() <= MAX_PUBLIC_NAMES {
        return Vec::new();
    }
    vec![format!(
        "{name}:1: {} names at the crate root, at most {MAX_PUBLIC_NAMES}: move some into a module: {}",
        names.len(),
        names.join(" ")
    )]
}

fn constructed_once(constructor: &str, sources: &[(String, String)]) -> Vec<String> {
    let constructions: Vec<String> = sources
        .iter()
        .flat_map(|(name, text)| {
            code(text).filter(|(_, line)| names(line, constructor)).map(move |(number, _)| format!("{name}:{number}"))
        })
        .collect();
    if constructions.len() == 1 {
        return Vec::new();
    }
    vec![format!("{constructor}…) is called once, when the server is built; found: {constructions:?}")]
}

/// What a sleep in a test may be, as the comment at its line or the line before must say.
const SLEEPS: [&str; 3] = ["polling interval", "pacing", "observation window"];

/// A test that sleeps until something has happened is slow, or fails on a slow machine.
fn sleeps(name: &str, text: &str) -> Vec<String> {
    let all: Vec<(usize, &str)> = lines(text).collect();
    let mut complaints = Vec::new();
    for (number, line) in
        code(text).filter(|(_, line)| line.contains("time::sleep(") || line.contains("thread::sleep("))
    {
        let before = all.get(number.wrapping_sub(2)).map_or("", |(_, line)| line).trim();
        let comment = all[number - 1].1[line.len()..].to_owned() + if before.starts_with("//") { before } else { "" };
        // Code in a string, which another program executes.
        let is_quoted = line.matches('"').count() > 0;
        if !is_quoted && !SLEEPS.iter().any(|reason| comment.to_lowercase().contains(reason)) {
            complaints.push(format!(
                "{name}:{number}: wait for the event, or poll with `wait_until`; a sleep is only for {}, as its comment says",
                SLEEPS.join(", ")
            ));
        }
    }
    complaints
}

/// A conformance case is a public function that takes a fixture.
fn conformance(name: &str, text: &str, list: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    for (number, line) in code(text).filter(|(_, line)| line.contains("Fixture)")) {
        let Some(case) = line.trim_start().strip_prefix("pub async fn ").and_then(|rest| rest.split(['(', '<']).next())
        else {
            continue;
        };
        if !code(list).any(|(_, line)| line.split(|c| !is_word(c)).any(|word| word == case)) {
            complaints.push(format!(
                "{name}:{number}: every conformance test is run: add {case} to the list in the `conformance!` macro"
            ));
        }
    }
    complaints
}

fn dependencies(name: &str, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    for (number, line) in lines(text) {
        let renamed = line.split("package = \"").nth(1).and_then(|rest| rest.split('"').next());
        // A dependency is written as `axum = "1"`, `axum.workspace = true` or `[dependencies.axum]`.
        let key = line.split(['=', ' ']).next().and_then(|key| key.split('.').next());
        let table = line.strip_prefix('[').and_then(|rest| rest.trim_end().trim_end_matches(']').rsplit('.').next());
        for dependency in
            [renamed, key, table].into_iter().flatten().filter(|dependency| NOT_A_DEPENDENCY.contains(dependency))
        {
            complaints.push(format!(
                "{name}:{number}: the library knows neither HTTP nor CLI nor Python: {dependency} belongs in tenure-server or tenure-py"
            ));
        }
    }
    complaints
}

// Helpers that read files.

fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn name(path: &Path) -> String {
    path.strip_prefix(package()).unwrap_or(path).display().to_string()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Files with this extension in a directory, sorted; empty if the directory does not exist.
fn files_in(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let mut files: Vec<_> = entries(directory)
        .filter(|path| path.extension().is_some_and(|file_extension| file_extension == extension))
        .collect();
    files.sort();
    files
}

/// The Rust files in this directory of each crate.
fn in_all_crates(directory: &str) -> Vec<PathBuf> {
    ["tenure", "tenure-server"]
        .iter()
        .flat_map(|krate| files_under(&package().join("..").join(krate).join(directory), "rs"))
        .collect()
}

fn files_under(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let mut files = files_in(directory, extension);
    files.extend(entries(directory).filter(|path| path.is_dir()).flat_map(|path| files_under(&path, extension)));
    files
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
}

fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(index, line)| (index + 1, line))
}

/// The lines without `//` comments; the `//` in a URL does not start a comment.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    lines(text).map(|(number, line)| {
        let comment = line.match_indices("//").map(|(at, _)| at).find(|at| !line[..*at].ends_with(':'));
        (number, &line[..comment.unwrap_or(line.len())])
    })
}

fn forbid<'a>(name: &str, lines: impl Iterator<Item = (usize, &'a str)>, words: &[&str], remedy: &str) -> Vec<String> {
    let complain = |(number, line): (usize, &str)| {
        words
            .iter()
            .find(|word| names(line, word))
            .map(|word| format!("{name}:{number}: `{word}` is not allowed here; {remedy}"))
    };
    lines.filter_map(complain).collect()
}

/// Returns true if a line contains a phrase as whole words: `know(` does not contain `now(`.
fn names(line: &str, phrase: &str) -> bool {
    let joins = |left: Option<char>, right: Option<char>| left.is_some_and(is_word) && right.is_some_and(is_word);
    line.match_indices(phrase).any(|(at, _)| {
        let before = &line[..at];
        let after = &line[at + phrase.len()..];
        !joins(before.chars().next_back(), phrase.chars().next())
            && !joins(phrase.chars().next_back(), after.chars().next())
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn report(complaints: &[String]) {
    assert!(complaints.is_empty(), "{} complaint(s)\n\n{}\n", complaints.len(), complaints.join("\n"));
}

/// Tests of the rules themselves: each must report a violation and accept correct text.
mod rules {
    use super::*;

    /// The line numbers of the reported violations.
    fn at(complaints: &[String]) -> Vec<usize> {
        complaints.iter().map(|complaint| complaint.split(':').nth(1).unwrap().parse().unwrap()).collect()
    }

    #[test]
    fn pure_rules_complain() {
        let bad = "async fn a() {}\nx: &dyn Store,\nlet t = Timestamp::now();\nstd::fs::read(p)\nuse std::{fs, io};\nfs::read(p)\nuse tokio::sync;\nlet u = \"http://x\"; tokio::x()";
        assert_eq!(at(&pure_rules("a.rs", bad)), [1, 2, 3, 4, 6, 7, 8]);
        let good = "// async Store now( tokio\n/// Stored.\nlet x = Stored::know(now); // Store\nfn asynchronous() {}";
        assert_eq!(at(&pure_rules("a.rs", good)), []);
        assert_eq!(
            pure_rules("a.rs", "\nStore")[0].split(';').next(),
            Some("a.rs:2: `Store` is not allowed here"),
            "a complaint names file, line and word"
        );
    }

    #[test]
    fn sleeps_complain() {
        let bad = "tokio::time::sleep(x).await;\nstd::thread::sleep(x); // lets it finish\n";
        assert_eq!(at(&sleeps("a.rs", bad)), [1, 2]);
        let good = "tokio::time::sleep(x).await; // polling interval\n// Pacing: a client.\nthread::sleep(x);\nlet s = \"time.sleep(9)\";";
        assert_eq!(at(&sleeps("a.rs", good)), []);
    }

    #[test]
    fn plain_types_complain() {
        assert_eq!(at(&plain_types("a.rs", "tokio::x\npub async fn f()\nStore\nRestore // Store\nasync")), [1, 2, 3]);
    }

    #[test]
    fn short_complains() {
        assert_eq!(at(&short("a.rs", &"x\n".repeat(MAX_LINES))), []);
        assert_eq!(at(&short("a.rs", &"x\n".repeat(MAX_LINES + 1))), [MAX_LINES + 1]);
    }

    #[test]
    fn migrations_complain() {
        let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        let check = |sqlite: &[&str], postgres: &[&str]| migrations(&names(sqlite), &names(postgres)).len();
        assert_eq!(check(&[], &[]), 0);
        assert_eq!(check(&["0001_init.sql", "0002_x.sql"], &["0001_init.sql", "0002_x.sql"]), 0);
        assert_eq!(check(&["0001_init.sql"], &[]), 1, "one dialect");
        assert_eq!(check(&["0001_init.sql"], &["0001_start.sql"]), 2, "two names");
        assert_eq!(check(&["0001_init.sql", "0003_x.sql"], &["0001_init.sql", "0003_x.sql"]), 2, "a hole");
    }

    #[test]
    fn finished_complains() {
        let bad = "todo!()\nunimplemented!(\"later\")\n// FIXME\n// XXX\n#[ignore]\n#[ignore = \"slow\"]";
        assert_eq!(at(&finished("a.rs", bad)), [1, 2, 3, 4, 5, 6]);
        assert_eq!(at(&finished("a.rs", "todo\n\"XXXXXX\"\n#[ignored]")), []);
    }

    #[test]
    fn markdown_complains() {
        let bad = "a \n[x](gone.md)\n[`x`](gone.md#part \"title\")\nok\t\n[a](here.md) [b](gone.md)";
        assert_eq!(at(&markdown("a.md", bad, |link| link == "here.md")), [1, 2, 3, 4, 5]);
        let good = "[x](here.md)\n[x](here.md#part)\n[x](#part)\n[x](https://a.b/c)\n`a[0](b)`\n```\nx[0](y)\n```";
        assert_eq!(at(&markdown("a.md", good, |link| link == "here.md")), []);
    }

    #[test]
    fn named_tests_complain() {
        let source = |file: &str| if file == "it/a.rs" { "fn there(".to_owned() } else { String::new() };
        let text = "`it/a.rs::there`\n`it/a.rs::gone` and `it/b.rs::there`\n`it/a.rs`";
        assert_eq!(at(&named_tests("a.md", text, source)), [2, 2]);
    }

    #[test]
    fn seed_claims_complain() {
        let text = |rows: &str| format!("| all | 2 | 1 | 1 | 0 |\n| 000-1 | a | ✓ | `a.rs::b` |\n{rows}");
        assert_eq!(seed_claims("a.md", &text("| 000-2 | b | ≠ | because |")), [""; 0]);
        assert_eq!(at(&seed_claims("a.md", &text("| 000-2 | b | ✓ | surely |"))), [3]);
        assert_eq!(at(&seed_claims("a.md", &text("| 000-2 | b | maybe | `a.rs::b` |"))), [3]);
        assert_eq!(at(&seed_claims("a.md", &text("| 000-2 | b | open | missing |"))), [1], "the counts differ");
    }

    #[test]
    fn named_files_complain() {
        let text = "`a/b.rs`\n`gone.rs` and `gone/`\n`a/b.rs::test` `a/NAME.rs` `NNNN_name.sql` `a/{b,c}/` `/route/`\n```\n`gone.rs`\n```\n`gone.toml`";
        assert_eq!(at(&named_files("a.md", text, |file| file == "a/b.rs")), [2, 2, 7]);
    }

    #[test]
    fn public_names_complain() {
        let list = |names: usize| (0..names).map(|n| format!("N{n}")).collect::<Vec<_>>().join(",\n    ");
        let text = |names: usize| {
            format!(
                "mod a;\npub mod b;\npub mod c {{\n    pub use x::{{Y, Z}};\n}}\npub use d::E;\npub use f::{{\n    {},\n}};\n",
                list(names)
            )
        };
        assert_eq!(public_names("lib.rs", &text(MAX_PUBLIC_NAMES - 3)), [""; 0]);
        let complaints = public_names("lib.rs", &text(MAX_PUBLIC_NAMES - 2));
        assert!(complaints[0].contains(&format!("{} names", MAX_PUBLIC_NAMES + 1)), "{complaints:?}");
        assert!(complaints[0].contains(": b c E N0 N1 "), "{complaints:?}");
    }

    #[test]
    fn constructed_once_complains() {
        let sources =
            |texts: &[&str]| texts.iter().map(|text| ("a.rs".to_owned(), text.to_string())).collect::<Vec<_>>();
        let check = |texts: &[&str]| constructed_once("X::new(", &sources(texts)).len();
        assert_eq!(check(&["let x = X::new(y);", "// X::new(z)", "MaX::new(z)"]), 0);
        assert_eq!(check(&["X::new(y)", "X::new(z)"]), 1, "twice");
        assert_eq!(check(&["X::open(y)"]), 1, "renamed: the list is stale");
    }

    #[test]
    fn conformance_complains() {
        let text = "// case\npub async fn listed(f: Fixture) {}\npub async fn forgotten(Fixture { s, .. }: Fixture) {}\npub async fn help(s: S) {}";
        let list = "// forgotten\nmacro_rules! conformance { listed not_forgotten }";
        assert_eq!(at(&conformance("a.rs", text, list)), [3]);
    }

    #[test]
    fn dependencies_complain() {
        let bad = "axum = \"1\"\nclap.workspace = true\n[dependencies.hyper]\nweb = { package = \"reqwest\" }\n[target.'cfg(unix)'.dependencies.pyo3]";
        assert_eq!(at(&dependencies("Cargo.toml", bad)), [1, 2, 3, 4, 5]);
        assert_eq!(at(&dependencies("Cargo.toml", "[dependencies]\nserde = \"1\"\naxum-free = \"1\" # no axum")), []);
    }
}
