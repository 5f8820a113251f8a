//! The protocol of `up`'s servers: plain HTTP on loopback, TLS for other machines.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::time::SystemTime;

use paceline_cluster::nodes::discovery;
use paceline_serve::tls::{Identity, Made, Names, Own, Wire};

use super::Args;
use crate::output::tell;
use crate::{home, member};

/// An address that no machine has (RFC 5737): it only makes the system say by which of its own
/// addresses it would reach the world. Nothing is sent.
const ELSEWHERE: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 9);

impl Args {
    /// The server's protocol, with its certificate, which is printed.
    ///
    /// # Errors
    /// Files of a certificate that cannot be used, a home that cannot be written.
    pub(super) fn wire(&self) -> anyhow::Result<Wire> {
        let off_loopback = self.host.iter().find(|host| !is_loopback(**host));
        if self.insecure_http {
            if let Some(host) = off_loopback {
                tell(format_args!(
                    "warning: plain HTTP on {host}: others on the network can read prompts and keys"
                ));
            }
            return Ok(Wire::Plain);
        }
        let identity = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => Identity::from_files(certificate, key)?,
            _ if off_loopback.is_none() => return Ok(Wire::Plain),
            _ => self.own()?,
        };
        tell(format_args!(
            "certificate SHA-256 {}",
            identity.fingerprint()
        ));
        Ok(Wire::TlsOffLoopback(identity))
    }

    /// The certificate of this home.
    fn own(&self) -> anyhow::Result<Identity> {
        let own = Own::open(&home::tls_folder()?, &self.names(), unix_s())?;
        let why = own.made.as_ref().and_then(why);
        if let Some(why) = why {
            tell(format_args!(
                "warning: made a new certificate, {why}: clients must be given it anew"
            ));
        }
        let path = own.path.display();
        tell(format_args!("clients trust it by curl --cacert {path}"));
        Ok(own.identity)
    }

    /// Names by which other machines may call this one. Without an address to listen on, the one by
    /// which it reaches others must be in the certificate.
    fn names(&self) -> Names {
        let bound = self.host.iter().filter(|host| !is_loopback(**host));
        let bound = bound.filter_map(|host| match host.is_unspecified() {
            true => outgoing(),
            false => Some(host.to_canonical()),
        });
        let bound = bound.map(|ip| ip.to_string());
        let all = discovery::addresses().into_iter();
        let all = all.map(|ip| ip.to_string());
        Names {
            needed: bound.chain(self.allow_host.iter().cloned()).collect(),
            further: own_names().into_iter().chain(all).collect(),
        }
    }
}

/// The machine's name, alone and as multicast DNS has it.
pub(super) fn own_names() -> Vec<String> {
    let name = member::host_name();
    let local = format!("{name}.local");
    if name.is_empty() {
        return Vec::new();
    }
    vec![name, local]
}

/// The line about a certificate that takes the place of an earlier one.
fn why(made: &Made) -> Option<String> {
    Some(match made {
        Made::First => return None,
        Made::Expires => "the earlier one ends within a month".to_owned(),
        Made::Name(name) => format!("the earlier one is not for {name}"),
        Made::Unusable => "the earlier one cannot be used".to_owned(),
    })
}

fn is_loopback(host: IpAddr) -> bool {
    host.to_canonical().is_loopback()
}

/// The address by which this machine reaches others; none without a network.
fn outgoing() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect(ELSEWHERE).ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

fn unix_s() -> u64 {
    let since = SystemTime::UNIX_EPOCH.elapsed();
    since.map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_certificate_in_the_place_of_another_is_warned_of() {
        assert_eq!(why(&Made::First), None);
        let said = why(&Made::Name("192.0.2.1".into())).unwrap();
        assert!(said.contains("192.0.2.1"), "{said}");
    }
}
