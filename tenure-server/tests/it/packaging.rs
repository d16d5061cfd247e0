//! The files in `contrib/`: they parse, and name only files, flags, settings and metrics that exist.

use crate::support::binary;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tenure_server::config::Config;
use tenure_server::observability::{catalog, process};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn yaml(path: &str) -> Value {
    serde_saphyr::from_str(&read(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Asserts that a command of the binary is valid, by asking for its help.
fn assert_command(command: &str) {
    let args: Vec<&str> = command.split_whitespace().skip(1).collect();
    let output = Command::new(binary()).args(&args).arg("--help").output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn systemd_units_call_commands_that_exist() {
    let unit = read("contrib/systemd/tenure.service");
    let start = unit.lines().find_map(|l| l.strip_prefix("ExecStart=")).unwrap();
    assert_command(start);
    let config: Config = Config::parse(&read("contrib/debian/tenure.yaml")).unwrap();
    assert_eq!(config.store, "sqlite:/var/lib/tenure/tenure.db");
    for needed in ["User=tenure", "NoNewPrivileges=yes", "ProtectSystem=strict", "StateDirectory=tenure"] {
        assert!(unit.lines().any(|l| l == needed), "{needed}");
    }
    // The server is given the time that it takes to complete what is in progress.
    let stop = unit.lines().find_map(|l| l.strip_prefix("TimeoutStopSec=")?.parse::<u64>().ok()).unwrap();
    assert!(stop > config.limits.drain_timeout.duration().unwrap().as_secs());
    let backup = read("contrib/systemd/tenure-backup.service");
    assert!(backup.contains("/usr/bin/tenure --config /etc/tenure/tenure.yaml backup "), "{backup}");
    assert_command("tenure --config /etc/tenure/tenure.yaml backup x");
    if Command::new("systemd-analyze").arg("--version").output().is_ok() {
        for name in ["tenure.service", "tenure-backup.service", "tenure-backup.timer"] {
            // The binary is not installed where the unit expects it; everything else must be right.
            let dir = tempfile::tempdir().unwrap();
            let text = read(&format!("contrib/systemd/{name}")).replace("/usr/bin/tenure", &binary());
            fs::write(dir.path().join(name), text).unwrap();
            if name == "tenure-backup.timer" {
                let service = read("contrib/systemd/tenure-backup.service").replace("/usr/bin/tenure", &binary());
                fs::write(dir.path().join("tenure-backup.service"), service).unwrap();
            }
            let verify = Command::new("systemd-analyze")
                .args(["verify", "--man=no"])
                .arg(dir.path().join(name))
                .output()
                .unwrap();
            let messages = String::from_utf8_lossy(&verify.stderr).into_owned();
            let about: Vec<&str> = messages.lines().filter(|l| l.contains("tenure")).collect();
            assert_eq!(about, Vec::<&str>::new(), "{messages}");
        }
    }
}

#[test]
fn the_container_image_is_built_from_files_of_its_context() {
    let dockerfile = read("contrib/Dockerfile");
    let script = read("scripts/package.sh");
    let mut copied = BTreeSet::new();
    for line in dockerfile.lines().filter_map(|l| l.strip_prefix("COPY ")) {
        let words: Vec<&str> = line.split_whitespace().filter(|w| !w.starts_with("--")).collect();
        copied.extend(words[..words.len() - 1].iter().map(|w| (*w).to_owned()));
    }
    assert_eq!(copied, ["LICENSE", "data", "tenure", "tenure.example.yaml"].map(str::to_owned).into());
    for file in ["LICENSE", "tenure.example.yaml", "contrib/Dockerfile"] {
        assert!(root().join(file).exists() && script.contains(file), "{file}");
    }
    assert!(dockerfile.contains("USER 65532:65532") && dockerfile.contains("HEALTHCHECK"));
    let json = |keyword: &str| -> Vec<String> {
        let (_, rest) = dockerfile.rsplit_once(keyword).unwrap();
        serde_json::from_str(rest[..rest.find(']').unwrap() + 1].trim()).unwrap()
    };
    let health = json("start-period=30s CMD");
    assert_eq!(health, ["/usr/bin/tenure", "healthcheck"]);
    assert_command(&health.join(" "));
    assert_command(&[json("ENTRYPOINT"), json("\nCMD")].concat().join(" "));
    let settings = dockerfile.lines().find_map(|l| l.strip_prefix("ENV ")).unwrap();
    check_settings(settings.split_whitespace().map(|pair| pair.split_once('=').unwrap()));
}

/// Asserts that environment variables are settings.
fn check_settings<'a>(variables: impl Iterator<Item = (&'a str, &'a str)>) {
    let mut command = Command::new(binary());
    let dir = tempfile::tempdir().unwrap();
    let output = command.arg("config").envs(variables).current_dir(dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_compose_file_has_two_nodes_on_one_database() {
    let compose = yaml("contrib/compose.yaml");
    for node in ["node1", "node2"] {
        let node = &compose["services"][node];
        assert_eq!((&node["image"], &node["read_only"]), (&Value::from("tenure"), &Value::from(true)), "{node}");
        assert_eq!(node["depends_on"]["db"]["condition"], "service_healthy");
        let settings = node["environment"].as_object().unwrap();
        check_settings(settings.iter().map(|(k, v)| (k.as_str(), v.as_str().unwrap())));
    }
    for secret in compose["secrets"].as_object().unwrap().values() {
        let file = secret["file"].as_str().unwrap();
        assert!(read("contrib/compose.yaml").contains(&format!("> {file}")), "the comment creates {file}");
    }
}

#[test]
fn the_package_contains_files_that_exist() {
    let script = read("scripts/package.sh");
    for word in script.split_whitespace().filter(|w| w.starts_with("contrib/") || w.starts_with("scripts/")) {
        if !word.contains('$') {
            assert!(root().join(word).exists(), "{word}");
        }
    }
    for name in ["postinst", "prerm", "postrm"] {
        let status = Command::new("sh").arg("-n").arg(root().join("contrib/debian").join(name)).status().unwrap();
        assert!(status.success(), "{name}");
    }
}

/// The names of all metrics, as they appear in expressions.
fn known_metrics() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (name, kind, _) in catalog::METRICS {
        names.insert((*name).to_owned());
        if *kind == catalog::MetricKind::Histogram {
            names.extend(["bucket", "sum", "count"].map(|suffix| format!("{name}_{suffix}")));
        }
    }
    names.extend(process::PROCESS_METRICS.iter().map(|(name, _, _)| (*name).to_owned()));
    names
}

/// The metrics that a text names.
fn named_metrics(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|w| w.starts_with("tenure_") || w.starts_with("process_")).map(str::to_owned).collect()
}

#[test]
fn dashboard_and_alerts_use_metrics_that_exist() {
    let known = known_metrics();
    let dashboard: Value = serde_json::from_str(&read("contrib/grafana-dashboard.json")).unwrap();
    let mut expressions: Vec<String> = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        expressions.extend(panel["targets"].as_array().unwrap().iter().map(|t| t["expr"].as_str().unwrap().to_owned()));
    }
    let panels = expressions.len();
    for rule in yaml("contrib/prometheus-alerts.yaml")["groups"][0]["rules"].as_array().unwrap() {
        expressions.push(rule["expr"].as_str().unwrap().to_owned());
        assert!(rule["alert"].is_string() && rule["annotations"]["summary"].is_string(), "{rule}");
    }
    assert!(panels > 10 && expressions.len() > panels + 5);
    for expression in &expressions {
        let unknown: Vec<_> = named_metrics(expression).difference(&known).cloned().collect();
        assert!(unknown.is_empty(), "{expression} uses {unknown:?}");
    }
}

/// The table of metrics in the documentation is complete, and so is the catalog: every metric that the source records is
/// in it.
#[test]
fn every_metric_is_documented() {
    let mut known: BTreeSet<String> = catalog::METRICS.iter().map(|(name, _, _)| (*name).to_owned()).collect();
    assert_eq!(known.len(), catalog::METRICS.len(), "each is described once");
    let mut recorded = BTreeSet::new();
    for directory in ["tenure/src", "tenure-server/src"] {
        visit(&root().join(directory), &mut |text| {
            for macro_name in ["counter!(\"", "gauge!(\"", "histogram!(\""] {
                recorded.extend(text.split(macro_name).skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()));
            }
        });
    }
    assert_eq!(recorded, known);
    known.extend(process::PROCESS_METRICS.iter().map(|(name, _, _)| (*name).to_owned()));
    let page = read("docs/operations.md");
    let section = page.split("\n## Metrics").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows: String = section.lines().filter(|l| l.starts_with("| `")).map(|l| l.split('|').nth(1).unwrap()).collect();
    assert_eq!(named_metrics(&rows), known);
}

fn visit(path: &Path, each: &mut impl FnMut(&str)) {
    for entry in fs::read_dir(path).unwrap().map(|e| e.unwrap().path()) {
        if entry.is_dir() {
            visit(&entry, each);
        } else if entry.extension().is_some_and(|e| e == "rs") {
            each(&fs::read_to_string(&entry).unwrap());
        }
    }
}
