//! Directories are layers. Computes the module graph of each crate from its source text and reports what goes against the
//! order of the layers: an import or method call upward or sideways, and any cycle between modules.
//!
//! The order is below. A module may use modules of lower layers, and of its own layer as long as there is no cycle.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Top-level modules of the library, lowest layer first. Modules in one row must not use each other.
const LIBRARY: &[&[&str]] = &[
    &["clock", "home", "private_files"],
    &["types"],
    &["rules"],
    &["store", "executors"],
    &["engine"],
    &["tenure"],
    &["memory"],
    &["session"],
    &["run"],
    &["review"],
    &["maintenance"],
    &["import"],
    &["handle"],
    &["open"],
    &["testing"],
    &["conformance"],
];

/// Top-level modules of the server, lowest layer first.
const SERVER: &[&[&str]] = &[
    &["clock", "error", "names", "tasks"],
    &["config", "headers"],
    &["http_client", "net"],
    &["auth", "llm", "observability", "tools", "transcripts", "webhooks", "workspace"],
    &["embed"],
    &["app"],
    &["sessions"],
    &["jobs"],
    &["http"],
    &["router"],
    &["serve", "signals", "startup"],
    &["cli"],
];

/// Types whose inherent methods are spread over layers: calling a method of a higher layer is an upward dependency as well.
const HANDLES: &[&str] = &["Tenure"];

#[test]
fn the_library_has_no_upward_dependency_and_no_cycle() {
    let sources = Sources::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    report(&violations(&sources, LIBRARY));
}

#[test]
fn the_server_has_no_upward_dependency_and_no_cycle() {
    let sources = Sources::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tenure-server/src"));
    report(&violations(&sources, SERVER));
}

fn report(violations: &[String]) {
    assert!(violations.is_empty(), "{} violation(s)\n\n{}\n", violations.len(), violations.join("\n"));
}

/// The modules of a crate: their paths (`store::sqlite::heads`; the root is empty) and their text.
struct Sources(BTreeMap<Vec<String>, String>);

impl Sources {
    fn read(src: &Path) -> Self {
        let mut modules = BTreeMap::new();
        collect(src, &mut Vec::new(), &mut modules);
        Self(modules)
    }

    /// The longest prefix of a path that is a module.
    fn module_of(&self, path: &[String]) -> Vec<String> {
        (0..=path.len())
            .rev()
            .map(|n| path[..n].to_vec())
            .find(|prefix| self.0.contains_key(prefix))
            .unwrap_or_default()
    }
}

fn collect(directory: &Path, path: &mut Vec<String>, modules: &mut BTreeMap<Vec<String>, String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap().path();
        let name = entry.file_stem().unwrap().to_str().unwrap().to_owned();
        // Unit tests may use everything.
        if name == "tests" {
            continue;
        }
        path.push(name.clone());
        if entry.is_dir() {
            collect(&entry, path, modules);
        } else if entry.extension().is_some_and(|e| e == "rs") && !(path.len() == 1 && name == "main") {
            let module = if path.len() == 1 && name == "lib" { Vec::new() } else { path.clone() };
            modules.insert(module, fs::read_to_string(&entry).unwrap());
        }
        path.pop();
    }
}

fn violations(sources: &Sources, layers: &[&[&str]]) -> Vec<String> {
    let mut violations = Vec::new();
    let rank = |module: &[String]| {
        let top = module.first()?;
        layers.iter().position(|row| row.contains(&top.as_str()))
    };
    let mut graph: BTreeMap<&[String], BTreeSet<Vec<String>>> = BTreeMap::new();
    let methods = methods(sources);
    for (module, text) in sources.0.iter().filter(|(module, _)| !module.is_empty()) {
        let Some(own_rank) = rank(module) else {
            violations.push(format!("{} is in no layer: add {:?} to tests/layers.rs", display(module), module[0]));
            continue;
        };
        let tokens = without_tests(tokens(text));
        let mut uses: Vec<(Vec<String>, String)> = Vec::new();
        let mut imports = BTreeSet::new();
        for path in paths(&tokens, module, sources) {
            let target = sources.module_of(&path);
            if target.is_empty() && !path.is_empty() {
                violations.push(format!(
                    "{} uses `crate::{}` by the crate root: name the module that defines it",
                    display(module),
                    path.join("::")
                ));
            } else if target != *module {
                imports.insert(target.clone());
                uses.push((target, path.join("::")));
            }
        }
        for name in called_methods(&tokens) {
            for target in methods.get(&name).into_iter().flatten().filter(|target| *target != module) {
                uses.push((target.clone(), format!("the method `{name}`")));
            }
        }
        for (target, usage) in uses {
            let Some(other) = rank(&target) else { continue };
            let direction = match () {
                () if other > own_rank => "upward",
                () if other == own_rank && target[0] != module[0] => "sideways",
                () => continue,
            };
            violations.push(format!("{} depends {direction} on {} ({usage})", display(module), display(&target)));
        }
        graph.insert(module, imports);
    }
    // Methods of a handle are called across the files of one layer: only imports make a cycle.
    violations.extend(cycles(&graph).into_iter().map(|cycle| {
        let cycle: Vec<String> = cycle.iter().map(|module| display(module)).collect();
        format!("modules depend on each other: {}", cycle.join(", "))
    }));
    violations.sort();
    violations.dedup();
    violations
}

fn display(module: &[String]) -> String {
    module.join("::")
}

/// The inherent methods of the handles, with the modules that define them.
fn methods(sources: &Sources) -> BTreeMap<String, BTreeSet<Vec<String>>> {
    let mut methods: BTreeMap<String, BTreeSet<Vec<String>>> = BTreeMap::new();
    for (module, text) in &sources.0 {
        let tokens = without_tests(tokens(text));
        let mut depth = 0;
        let mut block = None;
        for (i, token) in tokens.iter().enumerate() {
            match token.as_str() {
                "impl" if block.is_none() => {
                    let handle = tokens.get(i + 1).is_some_and(|name| HANDLES.contains(&name.as_str()));
                    if handle && tokens.get(i + 2).is_some_and(|brace| brace == "{") {
                        block = Some(depth);
                    }
                }
                "{" => depth += 1,
                "}" => {
                    depth -= 1;
                    if block == Some(depth) {
                        block = None;
                    }
                }
                "fn" if block.is_some_and(|outer| depth == outer + 1) => {
                    methods.entry(tokens[i + 1].clone()).or_default().insert(module.clone());
                }
                _ => {}
            }
        }
    }
    methods
}

/// The names of methods that are called on a handle: `self.name(`, `tenure.name(`.
fn called_methods(tokens: &[String]) -> BTreeSet<String> {
    if !tokens.iter().any(|token| HANDLES.contains(&token.as_str())) {
        return BTreeSet::new();
    }
    let calls = tokens.windows(4).filter(|w| matches!(w[0].as_str(), "self" | "tenure") && w[1] == "." && w[3] == "(");
    calls.map(|w| w[2].clone()).collect()
}

/// Every path that names something of this crate, from the crate's root.
fn paths(tokens: &[String], module: &[String], sources: &Sources) -> Vec<Vec<String>> {
    let mut absolute = Vec::new();
    let (mut depth, mut inline): (usize, Vec<(String, usize)>) = (0, Vec::new());
    let mut i = 0;
    while i < tokens.len() {
        let token = tokens[i].as_str();
        let next = |n: usize| tokens.get(i + n).map_or("", String::as_str);
        match token {
            "mod" if next(2) == "{" => inline.push((next(1).to_owned(), depth)),
            "{" => depth += 1,
            "}" => {
                depth = depth.saturating_sub(1);
                inline.pop_if(|(_, outer)| *outer == depth);
            }
            _ => {}
        }
        let current: Vec<String> = module.iter().cloned().chain(inline.iter().map(|(name, _)| name.clone())).collect();
        if token == "use" {
            let (tree, end) = use_tree(tokens, i + 1, &[]);
            absolute.extend(tree.iter().filter_map(|path| from_root(path, &current, sources)));
            i = end;
            continue;
        }
        let begins = is_name(token) && next(1) == "::" && (i == 0 || !matches!(tokens[i - 1].as_str(), "::" | "."));
        if begins {
            let mut path = vec![token.to_owned()];
            let mut end = i + 1;
            while tokens.get(end).is_some_and(|t| t == "::") && tokens.get(end + 1).is_some_and(|t| is_name(t)) {
                path.push(tokens[end + 1].clone());
                end += 2;
            }
            absolute.extend(from_root(&path, &current, sources));
            i = end;
            continue;
        }
        i += 1;
    }
    absolute
}

/// A path as seen from the root, if it begins with `crate`, `self`, `super` or a child of the module.
fn from_root(path: &[String], current: &[String], sources: &Sources) -> Option<Vec<String>> {
    let mut base = current.to_vec();
    let mut rest = path;
    match path[0].as_str() {
        "crate" => {
            base.clear();
            rest = &path[1..];
        }
        "self" | "super" => {
            while let Some(first) = rest.first().filter(|first| matches!(first.as_str(), "self" | "super")) {
                if first == "super" {
                    base.pop();
                }
                rest = &rest[1..];
            }
        }
        child => {
            base.push(child.to_owned());
            let is_child = sources.0.contains_key(&base);
            base.pop();
            if !is_child {
                return None;
            }
        }
    }
    base.extend(rest.iter().filter(|name| *name != "*" && *name != "self").cloned());
    Some(base)
}

/// The paths of a use tree that begins at a token, and where it ends.
fn use_tree(tokens: &[String], mut i: usize, prefix: &[String]) -> (Vec<Vec<String>>, usize) {
    let mut path = prefix.to_vec();
    loop {
        match tokens.get(i).map(String::as_str) {
            Some("{") => {
                let mut all = Vec::new();
                i += 1;
                while tokens.get(i).is_some_and(|t| t != "}") {
                    let (some, end) = use_tree(tokens, i, &path);
                    all.extend(some);
                    i = end + usize::from(tokens.get(end).is_some_and(|t| t == ","));
                }
                return (all, i + 1);
            }
            Some("::") => i += 1,
            Some(name) if is_name(name) || name == "*" => {
                path.push(name.to_owned());
                i += 1;
                if tokens.get(i).is_none_or(|t| t != "::") {
                    i += if tokens.get(i).is_some_and(|t| t == "as") { 2 } else { 0 };
                    return (vec![path], i);
                }
            }
            _ => return (Vec::new(), i + 1),
        }
    }
}

/// Groups of modules that can reach each other.
fn cycles<'a>(graph: &BTreeMap<&'a [String], BTreeSet<Vec<String>>>) -> Vec<Vec<&'a [String]>> {
    let reach = |from: &[String]| {
        let mut seen: BTreeSet<&[String]> = BTreeSet::new();
        let mut open: Vec<&[String]> = graph.get(from).into_iter().flatten().map(Vec::as_slice).collect();
        while let Some(module) = open.pop() {
            if seen.insert(module) {
                open.extend(graph.get(module).into_iter().flatten().map(Vec::as_slice));
            }
        }
        seen.into_iter().map(<[String]>::to_vec).collect::<BTreeSet<_>>()
    };
    let reachable: BTreeMap<&[String], BTreeSet<Vec<String>>> =
        graph.keys().map(|module| (*module, reach(module))).collect();
    let mut groups: Vec<Vec<&[String]>> = Vec::new();
    for (module, reached) in reachable.iter().filter(|(module, reached)| reached.contains(**module)) {
        if groups.iter().any(|group| group.contains(module)) {
            continue;
        }
        let mutual = |other: &&&[String]| reached.contains(**other) && reachable[**other].contains(*module);
        groups.push(reachable.keys().filter(mutual).copied().collect());
    }
    groups
}

/// Tokens without comments, literals and whitespace: names, `::` and single characters.
fn tokens(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let mut tokens = Vec::new();
    let mut i = 0;
    while i < chars.len() {
        let next = |n: usize| chars.get(i + n).copied().unwrap_or(' ');
        match chars[i] {
            '/' if next(1) == '/' => {
                while i < chars.len() && chars[i] != '\n' {
                    i += 1;
                }
            }
            '/' if next(1) == '*' => {
                while i < chars.len() && !(chars[i] == '*' && chars.get(i + 1) == Some(&'/')) {
                    i += 1;
                }
                i += 2;
            }
            'r' if next(1) == '"' || (next(1) == '#' && matches!(next(2), '"' | '#')) => {
                let hashes = chars[i + 1..].iter().take_while(|c| **c == '#').count();
                i += hashes + 2;
                let end = |at: usize| chars[at] == '"' && chars[at + 1..].iter().take(hashes).all(|c| *c == '#');
                while i < chars.len() && !end(i) {
                    i += 1;
                }
                i += hashes + 1;
            }
            '"' => {
                i += 1;
                while i < chars.len() && chars[i] != '"' {
                    i += if chars[i] == '\\' { 2 } else { 1 };
                }
                i += 1;
            }
            // A character, or a lifetime.
            '\'' if next(1) == '\\' => {
                i += 3;
                while i < chars.len() && chars[i] != '\'' {
                    i += 1;
                }
                i += 1;
            }
            '\'' if next(2) == '\'' => i += 3,
            '\'' => i += 1,
            ':' if next(1) == ':' => {
                tokens.push("::".to_owned());
                i += 2;
            }
            c if c == '_' || c.is_alphanumeric() => {
                let end = chars[i..].iter().take_while(|c| **c == '_' || c.is_alphanumeric()).count();
                tokens.push(chars[i..i + end].iter().collect());
                i += end;
            }
            c if c.is_whitespace() => i += 1,
            c => {
                tokens.push(c.to_string());
                i += 1;
            }
        }
    }
    tokens
}

/// Leaves out items behind `#[cfg(test)]`: they may use everything.
fn without_tests(tokens: Vec<String>) -> Vec<String> {
    let marker = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut remaining = Vec::new();
    let mut i = 0;
    while i < tokens.len() {
        if tokens[i..].iter().zip(marker).filter(|(token, want)| *token == want).count() == marker.len() {
            i += marker.len();
            let mut depth = 0;
            while i < tokens.len() {
                match tokens[i].as_str() {
                    "{" => depth += 1,
                    "}" => depth -= 1,
                    _ => {}
                }
                i += 1;
                if depth == 0 && matches!(tokens[i - 1].as_str(), "}" | ";") {
                    break;
                }
            }
            continue;
        }
        remaining.push(tokens[i].clone());
        i += 1;
    }
    remaining
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c == '_' || c.is_alphabetic())
}

/// A check that never complained proves nothing: planted violations.
mod planted {
    use super::*;

    const LAYERS: &[&[&str]] = &[&["low"], &["left", "right"], &["high"]];

    fn check(files: &[(&str, &str)]) -> Vec<String> {
        let module = |path: &str| path.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect();
        let root = [("", "mod low; mod left; mod right; mod high;")];
        let sources = root.iter().chain(files).map(|(path, text)| (module(path), (*text).to_owned())).collect();
        violations(&Sources(sources), LAYERS)
    }

    #[test]
    fn downward_is_allowed() {
        let files = [("low", "pub struct A;"), ("high", "use crate::low::A; fn f(_: crate::low::A) {}")];
        assert_eq!(check(&files), [""; 0]);
    }

    #[test]
    fn an_upward_import_is_found_in_every_notation() {
        let want = ["low::deep depends upward on high (high::A)"];
        for text in [
            "use crate::high::A;",
            "use crate::{high::{A as B}};",
            "use super::super::high::A;",
            "fn f(_: crate::high::A) {}",
            "mod inner { use super::super::super::high::A; }",
            "/* no comment */ const Q: char = '\\''; use crate::high::A;",
        ] {
            assert_eq!(check(&[("low", "mod deep;"), ("low::deep", text), ("high", "pub struct A;")]), want, "{text}");
        }
    }

    #[test]
    fn comments_strings_and_tests_are_ignored() {
        for text in [
            "// use crate::high::A;",
            "const S: &str = \"use crate::high::A;\";",
            "const S: &str = r#\"\"use crate::high::A;\"#;",
            "#[cfg(test)] mod tests { use crate::high::A; }",
        ] {
            assert_eq!(check(&[("low", text), ("high", "pub struct A;")]), [""; 0], "{text}");
        }
    }

    #[test]
    fn a_sideways_import_is_found() {
        let files = [("left", "use crate::right::A;"), ("right", "pub struct A;")];
        assert_eq!(check(&files), ["left depends sideways on right (right::A)"]);
    }

    #[test]
    fn a_cycle_within_a_layer_is_found() {
        let files = [
            ("low", "pub mod a; pub mod b; pub mod c;"),
            ("low::a", "use super::b::B; pub struct A;"),
            ("low::b", "use crate::low::c::C; pub struct B;"),
            ("low::c", "fn f(_: crate::low::a::A) {} pub struct C;"),
        ];
        assert_eq!(check(&files), ["modules depend on each other: low::a, low::b, low::c"]);
    }

    #[test]
    fn a_parent_that_uses_a_child_which_uses_it_is_a_cycle() {
        let files = [("low", "mod a; pub struct P; fn f() { a::g() }"), ("low::a", "use super::P; pub fn g() {}")];
        assert_eq!(check(&files), ["modules depend on each other: low, low::a"]);
    }

    #[test]
    fn a_call_of_a_method_of_a_higher_layer_is_found() {
        let files = [
            ("low", "pub struct Tenure; impl Tenure { fn read(&self) { self.erase() } }"),
            ("high", "use crate::low::Tenure; impl Tenure { pub fn erase(&self) { self.read() } }"),
        ];
        assert_eq!(check(&files), ["low depends upward on high (the method `erase`)"]);
    }

    #[test]
    fn the_crate_root_and_unknown_directories_are_refused() {
        let files = [("low", "fn f(_: crate::A) {}"), ("other", "")];
        let want = [
            "low uses `crate::A` by the crate root: name the module that defines it",
            "other is in no layer: add \"other\" to tests/layers.rs",
        ];
        assert_eq!(check(&files), want);
    }
}
