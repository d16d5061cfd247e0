//! A TCP proxy that can stall, like a network partition or a frozen machine: connections stay open, no bytes pass.

use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

pub struct Proxy {
    pub address: SocketAddr,
    passing: watch::Sender<bool>,
}

impl Proxy {
    /// A proxy in front of an address, which need not be listening yet.
    pub async fn new(to: String, passing: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let passing = watch::Sender::new(passing);
        let state = passing.subscribe();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(relay(client, to.clone(), state.clone()));
            }
        });
        Self { address, passing }
    }

    /// Forwards bytes, or stops forwarding. Bytes held back are forwarded later.
    pub fn pass(&self, passing: bool) {
        self.passing.send_replace(passing);
    }
}

async fn relay(client: TcpStream, to: String, mut passing: watch::Receiver<bool>) {
    if passing.wait_for(|passing| *passing).await.is_err() {
        return;
    }
    let Ok(server) = TcpStream::connect(&to).await else { return };
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    tokio::select! {
        () = copy(from_client, to_server, passing.clone()) => {}
        () = copy(from_server, to_client, passing) => {}
    }
}

async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut passing: watch::Receiver<bool>) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(n @ 1..) = from.read(&mut buffer).await {
        if passing.wait_for(|passing| *passing).await.is_err() || to.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
    // The end of a connection is not forwarded while the proxy stalls.
    let _ = passing.wait_for(|passing| *passing).await;
}
