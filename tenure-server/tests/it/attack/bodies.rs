//! Request bodies that are never completed.

use super::connections::{http2, http2_request, with_keys};
use super::{amount, is_long, report};
use crate::support::{assert_error, chat_request, http_client, send, wait_at_most};
use bytes::Bytes;
use futures_util::FutureExt;
use serde_json::Value;
use std::time::Duration;

/// Unfinished bodies on one HTTP/2 connection: a principal over its budget gets 429, others are served, memory
/// stays bounded and is released.
#[tokio::test(flavor = "multi_thread")]
async fn unfinished_bodies_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let yaml = if is_long() {
        "limits: {body_timeout: 5s}"
    } else {
        "limits: {body_timeout: 2s, max_body_bytes: 4194304, max_principal_body_bytes: 8388608, max_inflight_body_bytes: 16777216}"
    };
    let (server, key, other) = with_keys(dir.path(), yaml).await;
    let (before, _) = server.memory();
    let mut requests = http2(&server, &h2::client::Builder::new()).await;
    let size = amount(3 << 20, 17 << 20);
    let mut uploads = Vec::new();
    for n in 0..amount(60, 190) {
        // More than `max_streams` on one connection would be refused for another reason.
        if n > 0 && n % 90 == 0 {
            requests = http2(&server, &h2::client::Builder::new()).await;
        }
        let request = http2_request(&server, "POST", "/v1/chat/completions", &key);
        let mut ready = requests.clone().ready().await.unwrap();
        uploads.push(tokio::spawn(async move {
            let (response, mut stream) = ready.send_request(request, false).unwrap();
            // Sends until there is a response, which ends the stream.
            let upload = async {
                let mut remaining = size;
                while remaining > 0 {
                    stream.reserve_capacity(remaining.min(64 << 10));
                    let granted = std::future::poll_fn(|context| stream.poll_capacity(context)).await;
                    let Some(Ok(granted)) = granted else { break };
                    if stream.send_data(Bytes::from(vec![b' '; granted]), false).is_err() {
                        break;
                    }
                    remaining -= granted.min(remaining);
                }
            };
            let response = async {
                // The response arrives although the body is unfinished.
                response.await.unwrap()
            };
            let (response, ()) = tokio::join!(response, upload);
            let status = response.status().as_u16();
            let mut body = response.into_body();
            let mut text = Vec::new();
            while let Some(Ok(data)) = body.data().await {
                text.extend_from_slice(&data);
                let _ = body.flow_control().release_capacity(data.len());
            }
            (status, serde_json::from_slice::<Value>(&text).unwrap())
        }));
    }
    let ask = || http_client().post(format!("{}/v1/chat/completions", server.url)).json(&chat_request("s", "hi"));
    let (mut refused, mut late) = (0, 0);
    for upload in uploads {
        assert_eq!(send(ask().bearer_auth(&other)).await.0, 200, "another principal is not affected");
        let outcome = upload.await.unwrap();
        match outcome.0 {
            429 => {
                assert_error(&outcome, 429, "body_budget_exceeded", Some("max_principal_body_bytes"));
                refused += 1;
            }
            _ => {
                assert_error(&outcome, 408, "too_slow", Some("body_timeout"));
                late += 1;
            }
        }
    }
    assert!(refused > 0 && late > 0, "{refused} {late}");
    let (_, peak) = server.memory();
    // 180 MiB of bodies in the short form, 3.2 GiB in the long one.
    let bound = before + amount(100, 500) as u64;
    assert!(peak < bound, "{peak} MiB at most, {before} before");
    // In the short form the peak is close to what the allocator retains, so a release would not be visible.
    if is_long() {
        wait_at_most("memory is given back", Duration::from_secs(60), async || {
            // Allocators return memory only when they are used.
            send(ask().bearer_auth(&other)).await;
            server.memory().0 < before + 150
        })
        .await;
    }
    assert_eq!(send(ask().bearer_auth(&key)).await.0, 200, "the budget is given back");
    report("unfinished bodies", "refused with 429 / timed out", format!("{refused} / {late}"));
    report(
        "unfinished bodies",
        "memory in MiB before, at most, after",
        format!("{before}, {peak}, {}", server.memory().0),
    );
}

/// Bodies of all principals together over the total budget: 503 with `Retry-After`.
#[tokio::test(flavor = "multi_thread")]
async fn all_principals_together_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let yaml = "limits: {max_body_bytes: 1048576, max_principal_body_bytes: 1048576, max_inflight_body_bytes: 1572864}";
    let (server, key, other) = with_keys(dir.path(), yaml).await;
    let requests = http2(&server, &h2::client::Builder::new()).await;
    let unfinished = || {
        let request = http2_request(&server, "POST", "/v1/chat/completions", &key);
        let (response, mut stream) = requests.clone().send_request(request, false).unwrap();
        stream.send_data(Bytes::from(vec![b' '; 900 << 10]), false).unwrap();
        (response, stream)
    };
    let (mut response, mut stream) = unfinished();
    let text = "x".repeat(900 << 10);
    let mut seen = None;
    wait_at_most("the budget is used up", Duration::from_secs(60), async || {
        // If the other body came first, this one was refused, and is sent again.
        if (&mut response).now_or_never().is_some() {
            (response, stream) = unfinished();
        }
        let body = chat_request("s", &text);
        let request = http_client().post(format!("{}/v1/chat/completions", server.url)).bearer_auth(&other).json(&body);
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let retry = response.headers().contains_key("retry-after");
        seen = Some((status, retry, response.json::<Value>().await.unwrap()));
        status == 503
    })
    .await;
    let (status, retry, body) = seen.unwrap();
    assert_error(&(status, body), 503, "body_budget_exceeded", Some("max_inflight_body_bytes"));
    assert!(retry);
    stream.send_reset(h2::Reason::CANCEL);
    wait_at_most("there is room again", Duration::from_secs(30), async || {
        let request = http_client().post(format!("{}/v1/chat/completions", server.url)).bearer_auth(&other);
        send(request.json(&chat_request("s", &text))).await.0 == 200
    })
    .await;
}
