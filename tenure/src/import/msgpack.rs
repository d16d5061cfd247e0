//! Decodes MessagePack to JSON, as far as imports need it. Invariants: malformed input is an error and never a panic,
//! and memory is bounded by the length of the input.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Number, Value};

/// Maximum depth of nested values.
const MAX_NESTING: usize = 100;

/// The field that contains the type of an extension value.
pub(super) const EXTENSION: &str = "ext";

/// Decodes one value. Keys of maps become texts, and bytes become base64. An extension value whose data are
/// MessagePack becomes `{"ext": TYPE, "data": VALUE}`, any other `{"ext": TYPE, "data": BASE64}`.
pub(super) fn decode(bytes: &[u8]) -> Result<Value, &'static str> {
    let mut reader = Reader { rest: bytes };
    let value = reader.value(0)?;
    if reader.rest.is_empty() { Ok(value) } else { Err("there are bytes after the value") }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or("the value is incomplete")?;
        self.rest = rest;
        Ok(taken)
    }

    /// Reads a big-endian number of up to eight bytes.
    fn number(&mut self, len: usize) -> Result<u64, &'static str> {
        Ok(self.take(len)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// Reads a length. Elements have at least one byte, so that no length exceeds that of the rest.
    fn len(&mut self, bytes: usize) -> Result<usize, &'static str> {
        usize::try_from(self.number(bytes)?)
            .ok()
            .filter(|len| *len <= self.rest.len())
            .ok_or("a length exceeds the value")
    }

    fn signed(&mut self, len: usize) -> Result<Value, &'static str> {
        let shift = 64 - 8 * len as u32;
        let number = (self.number(len)? << shift) as i64 >> shift;
        Ok(number.into())
    }

    fn text(&mut self, len: usize) -> Result<Value, &'static str> {
        let text = std::str::from_utf8(self.take(len)?).map_err(|_| "a text is not UTF-8")?;
        Ok(text.into())
    }

    fn list(&mut self, len: usize, depth: usize) -> Result<Value, &'static str> {
        let mut list = Vec::new();
        for _ in 0..len {
            list.push(self.value(depth + 1)?);
        }
        Ok(Value::Array(list))
    }

    fn map(&mut self, len: usize, depth: usize) -> Result<Value, &'static str> {
        let mut map = Map::new();
        for _ in 0..len {
            let key = match self.value(depth + 1)? {
                Value::String(key) => key,
                other => other.to_string(),
            };
            let value = self.value(depth + 1)?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }

    fn extension(&mut self, len: usize, depth: usize) -> Result<Value, &'static str> {
        let kind = self.take(1)?[0] as i8;
        let data = self.take(len)?;
        let mut nested = Reader { rest: data };
        let data = match nested.value(depth + 1) {
            Ok(value) if nested.rest.is_empty() => value,
            _ => STANDARD.encode(data).into(),
        };
        let fields = [(EXTENSION.to_owned(), kind.into()), ("data".to_owned(), data)];
        Ok(Value::Object(fields.into_iter().collect()))
    }

    fn value(&mut self, depth: usize) -> Result<Value, &'static str> {
        if depth > MAX_NESTING {
            return Err("the value is nested too deeply");
        }
        let float = |number: f64| Number::from_f64(number).map_or(Value::Null, Value::Number);
        match self.take(1)?[0] {
            byte @ 0x00..=0x7f => Ok(byte.into()),
            byte @ 0xe0..=0xff => Ok((byte as i8).into()),
            byte @ 0x80..=0x8f => self.map((byte & 0x0f).into(), depth),
            byte @ 0x90..=0x9f => self.list((byte & 0x0f).into(), depth),
            byte @ 0xa0..=0xbf => self.text((byte & 0x1f).into()),
            0xc0 => Ok(Value::Null),
            0xc1 => Err("the byte 0xc1 is not used"),
            0xc2 => Ok(false.into()),
            0xc3 => Ok(true.into()),
            byte @ 0xc4..=0xc6 => {
                let len = self.len(1 << (byte - 0xc4))?;
                Ok(STANDARD.encode(self.take(len)?).into())
            }
            byte @ 0xc7..=0xc9 => {
                let len = self.len(1 << (byte - 0xc7))?;
                self.extension(len, depth)
            }
            0xca => Ok(float(f32::from_bits(self.number(4)? as u32).into())),
            0xcb => Ok(float(f64::from_bits(self.number(8)?))),
            byte @ 0xcc..=0xcf => Ok(self.number(1 << (byte - 0xcc))?.into()),
            byte @ 0xd0..=0xd3 => self.signed(1 << (byte - 0xd0)),
            byte @ 0xd4..=0xd8 => self.extension(1 << (byte - 0xd4), depth),
            byte @ 0xd9..=0xdb => {
                let len = self.len(1 << (byte - 0xd9))?;
                self.text(len)
            }
            byte @ 0xdc..=0xdd => {
                let len = self.len(2 << (byte - 0xdc))?;
                self.list(len, depth)
            }
            byte @ 0xde..=0xdf => {
                let len = self.len(2 << (byte - 0xde))?;
                self.map(len, depth)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn every_type_is_decoded() {
        for (bytes, want) in [
            (&b"\x07"[..], json!(7)),
            (b"\xff", json!(-1)),
            (b"\xc0", json!(null)),
            (b"\xc3", json!(true)),
            (b"\xcc\xff", json!(255)),
            (b"\xcd\x01\x00", json!(256)),
            (b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", json!(u64::MAX)),
            (b"\xd0\x80", json!(-128)),
            (b"\xd1\xff\x7f", json!(-129)),
            (b"\xd3\x80\0\0\0\0\0\0\0", json!(i64::MIN)),
            (b"\xca\x3f\xc0\0\0", json!(1.5)),
            (b"\xcb\x3f\xf8\0\0\0\0\0\0", json!(1.5)),
            (b"\xcb\x7f\xf8\0\0\0\0\0\0", json!(null)),
            (b"\xa2hi", json!("hi")),
            (b"\xd9\x02hi", json!("hi")),
            (b"\xc4\x02hi", json!("aGk=")),
            (b"\x92\x01\x02", json!([1, 2])),
            (b"\xdc\x00\x01\x01", json!([1])),
            (b"\x82\xa1a\x01\x02\x03", json!({"a": 1, "2": 3})),
            (b"\xde\x00\x01\xa1a\x01", json!({"a": 1})),
            (b"\xd4\x05\x07", json!({"ext": 5, "data": 7})),
            (b"\xc7\x03\x05\x92\x01\x02", json!({"ext": 5, "data": [1, 2]})),
            (b"\xd5\x06\x01\x02", json!({"ext": 6, "data": "AQI="})),
        ] {
            assert_eq!(decode(bytes).unwrap(), want, "{bytes:x?}");
        }
        let deep = [vec![0x91; 200], vec![0x01]].concat();
        for wrong in
            [&b""[..], b"\xc1", b"\xa2h", b"\xdf\xff\xff\xff\xff", b"\xa1\xff", b"\x01\x01", b"\x81\x01", &deep]
        {
            assert!(decode(wrong).is_err(), "{wrong:x?}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }
    }
}
