//! A minimal HTTP/1.1 client on one connection, with so little overhead that the server dominates the measurement.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub async fn connect(address: &str) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, buffer: Vec::with_capacity(1 << 16) }
    }

    /// Serializes a request.
    pub fn request(method: &str, path: &str, body: &str) -> Vec<u8> {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        (head + body).into_bytes()
    }

    /// Sends a request and reads the response. Returns the length of the body.
    pub async fn send(&mut self, request: &[u8]) -> usize {
        self.stream.write_all(request).await.unwrap();
        let head = self.head().await;
        let text = std::str::from_utf8(&self.buffer[..head]).unwrap().to_ascii_lowercase();
        assert!(text.starts_with("http/1.1 2"), "{text}{}", String::from_utf8_lossy(&self.buffer[head..]));
        match text.split("content-length: ").nth(1) {
            Some(rest) => {
                let length: usize = rest.split("\r\n").next().unwrap().trim().parse().unwrap();
                while self.buffer.len() < head + length {
                    self.more().await;
                }
                length
            }
            None => {
                while !self.buffer.ends_with(b"0\r\n\r\n") {
                    self.more().await;
                }
                self.buffer.len() - head
            }
        }
    }

    /// Sends a request and reads the stream to its end. Returns the time until the first event.
    pub async fn first_event(&mut self, request: &[u8]) -> std::time::Duration {
        let start = std::time::Instant::now();
        self.stream.write_all(request).await.unwrap();
        let head = self.head().await;
        while !self.buffer[head..].windows(5).any(|w| w == b"data:") {
            self.more().await;
        }
        let first = start.elapsed();
        while !self.buffer.ends_with(b"0\r\n\r\n") {
            self.more().await;
        }
        first
    }

    /// Reads the head of a response. Returns its end in the buffer.
    async fn head(&mut self) -> usize {
        self.buffer.clear();
        loop {
            self.more().await;
            if let Some(end) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                return end + 4;
            }
        }
    }

    async fn more(&mut self) {
        let read = self.stream.read_buf(&mut self.buffer).await.unwrap();
        assert!(read > 0, "the server closed the connection: {}", String::from_utf8_lossy(&self.buffer));
    }
}
