//! Startup settings of a node's HTTP server: access, protocol, board.
//!
//! Other machines use TLS, by default with this home's self-signed certificate; loopback clients
//! use plain HTTP.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use paceline_auth::tls::{
    CertificateNames, OwnCertificate, RenewalReason, ServerProtocol, TlsIdentity,
};
use paceline_cluster::nodes::discovery;
use paceline_serve::{
    Access, Config, ProcessMetrics, Puller, Remover, SpecError, TimeSource, UpstreamArg, Upstreams,
};

use crate::member::host_name;
use crate::{Dashboard, MessageSink, PullSource, settings};

/// A reserved address (RFC 5737): routing to it reveals the machine's own outgoing address. Nothing
/// is sent.
const ELSEWHERE: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 9);

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot look for API keys")]
    Keys(#[source] std::io::Error),
    #[error("{0}")]
    Serve(#[from] paceline_serve::Error),
    #[error("{0}")]
    Tls(#[from] paceline_auth::tls::Error),
    #[error("an upstream's settings")]
    Upstream(#[from] SpecError),
}

/// Settings of a server.
#[expect(
    missing_debug_implementations,
    reason = "what takes lines and finds models says nothing"
)]
pub struct Options<'a> {
    pub home: &'a Path,
    /// Addresses to bind, each with all ports.
    pub hosts: &'a [IpAddr],
    /// Ports, at least one.
    pub ports: &'a [u16],
    /// Additional host names.
    pub names: &'a [String],
    /// Web origins that may use the API.
    pub origins: &'a [String],
    /// Whether to accept requests from other machines without API keys.
    pub open_to_network: bool,
    /// Whether to ignore unknown request fields.
    pub is_lenient: bool,
    /// Lets clients remove models.
    pub remover: Option<Remover>,
    /// Lets clients fetch models.
    pub puller: Option<Puller>,
    /// Other servers that requests go to.
    pub upstreams: &'a [UpstreamArg],
    pub request: Duration,
    /// Price of a kilowatt-hour.
    pub kwh_price: Option<f64>,
    /// Files of a certificate and its key, instead of the self-signed one.
    pub certificate: Option<(&'a Path, &'a Path)>,
    /// Whether other machines use plain HTTP too.
    pub plain: bool,
    /// Settings of the dashboard's downloads.
    pub downloads: PullSource,
    /// Receives lines about certificates.
    pub tell: MessageSink,
}

impl Options<'_> {
    /// The server's settings and its board; [`watch`](Board::watch) then starts the board's logs.
    pub fn set_up(mut self) -> Result<(Config, Dashboard), Error> {
        let mut config = self.config()?;
        let board = Dashboard::new(config.live.clone(), Arc::clone(&self.downloads));
        let own = board.clone();
        config.facts = ProcessMetrics(Arc::new(move || own.facts()));
        let _ = board.0.upstreams.set(config.upstreams.clone());
        config.board = board.for_server();
        if let Some(price) = self.kwh_price {
            let _ = board.0.kwh_price.set(price);
        }
        Ok((config, board))
    }

    fn config(&mut self) -> Result<Config, Error> {
        let now = Instant::now;
        let mut config = Config::new(self.ports[0], TimeSource { now, unix_s });
        let hosts = self.hosts.iter();
        let all =
            hosts.flat_map(|host| self.ports.iter().map(|port| SocketAddr::new(*host, *port)));
        config.bind = all.collect();
        let keys = settings::api_keys(self.home);
        config.access = Access {
            hosts: self.names.to_vec(),
            origins: self.origins.to_vec(),
            keys: keys.try_exists().map_err(Error::Keys)?.then_some(keys),
            open_to_network: self.open_to_network,
        };
        config.is_lenient = self.is_lenient;
        config.remover = self.remover.take();
        config.puller = self.puller.take();
        config.times.request = self.request;
        config.upstreams = self.upstreams()?;
        // Checked first: an open server gets no certificate.
        config.check()?;
        config.wire = self.wire()?;
        if !matches!(config.wire, ServerProtocol::Plain) {
            config.access.hosts.extend(own_names());
        }
        Ok(config)
    }

    /// The upstreams; warns of those whose requests others can read.
    fn upstreams(&self) -> Result<Upstreams, Error> {
        let specs = self.upstreams.iter().map(|arg| arg.clone().open());
        let specs = specs.collect::<Result<Vec<_>, _>>()?;
        for spec in specs.iter().filter(|spec| spec.is_exposed()) {
            (self.tell)(&format!(
                "warning: plain HTTP to upstream {}: others on the network can read prompts and \
                 keys",
                spec.name()
            ));
        }
        let tell = Arc::clone(&self.tell);
        Ok(Upstreams::new(specs, Arc::new(move |line| tell(line)))?)
    }

    /// The server's protocol; reports the certificate.
    fn wire(&self) -> Result<ServerProtocol, Error> {
        let off_loopback = self.hosts.iter().find(|host| !is_loopback(**host));
        if self.plain {
            if let Some(host) = off_loopback {
                (self.tell)(&format!(
                    "warning: plain HTTP on {host}: others on the network can read prompts and keys"
                ));
            }
            return Ok(ServerProtocol::Plain);
        }
        let identity = match self.certificate {
            Some((certificate, key)) => TlsIdentity::from_files(certificate, key)?,
            None if off_loopback.is_none() => return Ok(ServerProtocol::Plain),
            None => self.own()?,
        };
        (self.tell)(&format!("certificate SHA-256 {}", identity.fingerprint()));
        Ok(ServerProtocol::TlsOffLoopback(identity))
    }

    /// The certificate of this home.
    fn own(&self) -> Result<TlsIdentity, Error> {
        let own = OwnCertificate::open(
            &settings::tls_folder(self.home),
            &self.certified(),
            unix_s(),
        )?;
        let why = own.made.as_ref().and_then(why);
        if let Some(why) = why {
            (self.tell)(&format!(
                "warning: made a new certificate, {why}: clients must be given it anew"
            ));
        }
        let path = own.path.display();
        (self.tell)(&format!("clients trust it by curl --cacert {path}"));
        Ok(own.identity)
    }

    /// Host names for the certificate. Without a bind address, it must include the outgoing
    /// address.
    fn certified(&self) -> CertificateNames {
        let bound = self.hosts.iter().filter(|host| !is_loopback(**host));
        let bound = bound.filter_map(|host| match host.is_unspecified() {
            true => outgoing(),
            false => Some(host.to_canonical()),
        });
        let bound = bound.map(|ip| ip.to_string());
        let all = discovery::addresses().into_iter();
        let all = all.map(|ip| ip.to_string());
        CertificateNames {
            needed: bound.chain(self.names.iter().cloned()).collect(),
            further: own_names().into_iter().chain(all).collect(),
        }
    }
}

/// The certificate to trust for a server at `host`, if it is that of the home at `folder`.
pub fn trusted(folder: &Path, host: &str) -> Option<PathBuf> {
    OwnCertificate::find(&settings::tls_folder(folder), host, unix_s())
}

/// The host name, plain and in multicast DNS.
fn own_names() -> Vec<String> {
    let name = host_name();
    let local = format!("{name}.local");
    if name.is_empty() {
        return Vec::new();
    }
    vec![name, local]
}

/// The line about a replaced certificate.
fn why(made: &RenewalReason) -> Option<String> {
    Some(match made {
        RenewalReason::First => return None,
        RenewalReason::Expires => "the earlier one ends within a month".to_owned(),
        RenewalReason::Name(name) => format!("the earlier one is not for {name}"),
        RenewalReason::Unusable => "the earlier one cannot be used".to_owned(),
    })
}

fn is_loopback(host: IpAddr) -> bool {
    host.to_canonical().is_loopback()
}

/// This machine's outgoing address; `None` without a network.
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
        assert_eq!(why(&RenewalReason::First), None);
        let said = why(&RenewalReason::Name("192.0.2.1".into())).unwrap();
        assert!(said.contains("192.0.2.1"), "{said}");
    }
}
