//! Waiting for a condition.

use std::time::Duration;

const INTERVAL: Duration = Duration::from_millis(5);
const ATTEMPTS: usize = 24_000;

/// Polls until a condition holds. Tests wait for conditions instead of sleeping, so that they are
/// neither slow nor dependent on the speed of the machine.
///
/// # Panics
///
/// If the condition does not hold within two minutes; `description` names it in the message.
pub async fn wait_until(description: &str, mut condition: impl AsyncFnMut() -> bool) {
    for _ in 0..ATTEMPTS {
        if condition().await {
            return;
        }
        tokio::time::sleep(INTERVAL).await;
    }
    panic!("timed out waiting until {description}");
}
