//! The setting `trusted_proxies`: reverse proxies in front of this server, by address or network.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// Addresses and networks of reverse proxies: `127.0.0.1`, `10.0.0.0/8`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct TrustedProxies(Vec<IpNet>);

impl TrustedProxies {
    /// Returns true if no proxy is configured.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if an address belongs to a trusted proxy.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(&address))
    }
}

impl TryFrom<Vec<String>> for TrustedProxies {
    type Error = String;

    fn try_from(texts: Vec<String>) -> Result<Self, String> {
        let parse = |text: &String| {
            let network = text.parse::<IpNet>().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from));
            network.ok_or_else(|| format!("{text:?} is not an address or network such as 127.0.0.1 or 10.0.0.0/8"))
        };
        texts.iter().map(parse).collect::<Result<_, _>>().map(Self)
    }
}

impl From<TrustedProxies> for Vec<String> {
    fn from(proxies: TrustedProxies) -> Self {
        let text = |network: &IpNet| {
            if network.prefix_len() == network.max_prefix_len() {
                network.addr().to_string()
            } else {
                network.to_string()
            }
        };
        proxies.0.iter().map(text).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_networks_are_recognised() {
        let proxies = TrustedProxies::try_from(vec!["127.0.0.1".to_owned(), "10.1.0.0/16".to_owned()]).unwrap();
        for (address, expected) in
            [("127.0.0.1", true), ("::ffff:127.0.0.1", true), ("10.1.2.3", true), ("10.2.0.1", false), ("::1", false)]
        {
            assert_eq!(proxies.contains(address.parse().unwrap()), expected, "{address}");
        }
        assert_eq!(Vec::<String>::from(proxies), ["127.0.0.1", "10.1.0.0/16"]);
        assert!(TrustedProxies::try_from(vec!["localhost".to_owned()]).unwrap_err().contains("localhost"));
    }
}
