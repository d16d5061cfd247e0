//! Disk usage.

use crate::*;
use std::path::Path;

pub fn size(path: &Path) -> u64 {
    match std::fs::metadata(path) {
        Ok(m) if m.is_dir() => std::fs::read_dir(path).unwrap().map(|e| size(&e.unwrap().path())).sum(),
        Ok(m) => m.len(),
        Err(_) => 0,
    }
}

/// 400 turns of 1 KB + 1 KB with a checkpoint each, compared with the same messages as raw rows.
pub async fn bytes(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let messages = |n: usize| vec![Message::user(&words(1000, n)), Message::assistant(&words(1000, n + 7))];
    let db = raw::open(&dir.path().join("raw.db"));
    (0..400).for_each(|n| raw::commit(&db, 1, n * 2, &messages(n)));
    drop(db);
    let raw = size(&dir.path().join("raw.db"));
    let kb = |b: u64| format!("{} KB", b / 1024);
    for kind in ["sqlite", "jsonl"] {
        let path = dir.path().join(kind);
        let tenure = Tenure::open(&format!("{kind}:{}", path.display())).await.unwrap();
        let session = create(&tenure, "s").await;
        for n in 0..400 {
            tenure.append(&bench_principal(), &session, messages(n)).await.unwrap();
        }
        assert_eq!(tenure.checkpoints(&bench_principal(), &session).await.unwrap().len(), 400);
        drop(tenure);
        let bytes = size(&path);
        report.row(
            format!("disk after 400 turns with checkpoints, {kind}"),
            kb(bytes),
            kb(raw),
            bytes as f64 / raw as f64,
            Promise::AtMost(1.3),
        );
    }
    let Some(store) = PostgresSchema::new() else { return };
    let tenure = Tenure::open(&store.url()).await.unwrap();
    let url = store.server();
    let schema = store.name();
    let session = create(&tenure, "s").await;
    let table = format!("create table {schema}.m(id bigserial, sid bigint, data text, primary key(sid, id))");
    run("psql", url, &["-qc", &table]);
    for n in 0..400 {
        tenure.append(&bench_principal(), &session, messages(n)).await.unwrap();
        if n % 20 == 0 {
            // The raw rows are inserted in batches of twenty: only their size is measured.
            let rows: Vec<String> = (n..n + 20).flat_map(messages).map(|m| format!("(1, '{}')", m.as_str())).collect();
            run("psql", url, &["-qc", &format!("insert into {schema}.m(sid, data) values {}", rows.join(","))]);
        }
    }
    let total = |like: &str| {
        let sql = format!(
            "select sum(pg_total_relation_size(c.oid)) from pg_class c join pg_namespace n on n.oid = c.relnamespace \
             where n.nspname = '{schema}' and c.relkind = 'r' and c.relname {like}"
        );
        run("psql", url, &["-Atqc", &sql]).trim().parse::<u64>().unwrap()
    };
    let log = total("= 'tenure_record'");
    let all = total("like 'tenure_%'");
    let raw = total("= 'm'");
    for (label, bytes, promise) in [
        ("disk after 400 turns with checkpoints, postgres, all tables and indexes", all, Promise::AtMost(1.3)),
        ("of that the log", log, Promise::None),
    ] {
        report.row(label, kb(bytes), kb(raw), bytes as f64 / raw as f64, promise);
    }
}
