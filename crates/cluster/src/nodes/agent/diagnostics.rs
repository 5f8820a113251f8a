//! Network diagnosis of two nodes: tests in both directions why they do not reach each other.
//!
//! ```text
//! examiner -> a session to the other node, service "examine", then requests in turn, JSON:
//!   Back           connect to my control port           <- Reached
//!   Listen         listen at a data port                <- Listens(port) or ListensAt(addr)
//!   Connect(port)  connect to this data port of mine    <- Reached
//!   ConnectAt(addr)  the same at a data address of mine  <- Reached
//!   Say(nonce)     send datagrams to the beacons' groups  <- Said
//!   Hear(nonce)    listen for such datagrams            <- Said, later Heard
//! Bulk(bytes)    receive and return this many bytes   <- Segment
//! ```
//! A node with a dedicated data interface listens at that interface's address instead of the
//! control session's. It sends the address, as its workers do.
//!
//! Nothing is changed on either machine. Each test has a deadline; all together take some ten
//! seconds if everything is blocked.

mod findings;

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use paceline_base::lock;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::super::clock::SKEW_MAX;
use super::super::discovery::{Probe, listen_address};
use super::super::session::{self, Hello, NodeSession, Purpose};
use super::channel::{self, ServiceChannel};
use super::{Agent, Error, Inner, dial, random};
pub use findings::{Finding, Test};
use findings::{judge_mtu, multicast, segment, test_place, unreached};

/// The service's name.
pub(super) const SERVICE: &str = "examine";

/// Time limit of one connection or answer.
const LIMIT: Duration = Duration::from_secs(2);

/// Time of listening for datagrams; they are sent five times within a second.
const HEAR: Duration = Duration::from_millis(1800);

/// Bytes sent each way: many packets of the largest size.
const BULK_BYTES: usize = 256 << 10;

const ADDRESSES_MAX: usize = 4;

/// Longest session of one examiner.
const SERVE_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Serialize, Deserialize)]
enum DiagnosticRequest {
    Back,
    Listen,
    Connect(u16),
    /// Sent instead by a node with a dedicated data interface.
    ConnectAt(SocketAddr),
    Say(u64),
    Hear(u64),
    Bulk(usize),
}

#[derive(Debug, Serialize, Deserialize)]
enum DiagnosticResponse {
    /// The error, if there was one.
    Reached(Option<String>),
    /// The port on all addresses, or the error.
    Listens(Result<u16, String>),
    /// The address, with a dedicated data interface.
    ListensAt(SocketAddr),
    Said,
    /// The networks over which datagrams arrived.
    Heard(Vec<String>),
    /// Maximum segment size (MSS) of the connection, and its outgoing interface and MTU.
    Segment {
        bytes: Option<u32>,
        interface: String,
        mtu: Option<u32>,
    },
}

impl Agent {
    /// Tests the connectivity of this node and the one at `host` (`HOST` or `HOST:PORT`). `found`
    /// receives each finding at once.
    pub fn examine(&self, host: &str, mut found: impl FnMut(Finding)) {
        let inner = &self.inner;
        let places = match dial::resolve(host) {
            Ok(places) if !places.is_empty() => places,
            Ok(_) => {
                return found(Finding::new(
                    Test::Address,
                    false,
                    format!("{host} has no address"),
                ));
            }
            Err(error) => return found(Finding::new(Test::Address, false, error.to_string())),
        };
        let mut reached = None;
        for place in places.into_iter().take(ADDRESSES_MAX) {
            let session = inner.knock(place, &mut found);
            reached = session.or(reached);
            if reached.is_some() {
                break;
            }
        }
        if let Some(session) = reached
            && let Err(error) = inner.examine_peer(session, &mut found)
        {
            let broken = format!("the tests ended early: {error}");
            found(Finding::new(Test::Control, false, broken));
        }
    }
}

impl Inner {
    /// Connects to a control port. Passes findings to `found`; returns the session if there is one.
    fn knock(&self, place: SocketAddr, found: &mut dyn FnMut(Finding)) -> Option<NodeSession> {
        let seen: Mutex<Option<Hello>> = Mutex::default();
        let judge = |id, hello: &Hello| {
            *lock(&seen) = Some(hello.clone());
            self.judge(id, hello)
        };
        let (key, began) = (self.key_and_era().0, Instant::now());
        let reached = self.with_own(&key, &judge, |own| {
            session::dial(own, place, Purpose::Service, LIMIT)
        });
        let port = place.port();
        if let Err(session::Error::Connect { source, .. }) = &reached {
            found(Finding::new(Test::Control, false, unreached(place, source)).at(port));
            return None;
        }
        let took = began.elapsed().as_secs_f64() * 1e3;
        found(
            Finding::new(
                Test::Control,
                true,
                format!("{place} answers, {took:.1} ms"),
            )
            .at(port),
        );
        if let Some(hello) = &*lock(&seen) {
            found(self.clock(hello));
        }
        match reached {
            Ok(session) => {
                let name = &session.hello().name;
                found(Finding::new(
                    Test::Membership,
                    true,
                    format!("{name} is of this cluster"),
                ));
                Some(session)
            }
            // The clock was already reported.
            Err(_) if lock(&seen).as_ref().is_some_and(|it| self.is_off(it)) => None,
            Err(error) => {
                found(Finding::new(Test::Membership, false, error.to_string()));
                None
            }
        }
    }

    fn is_off(&self, hello: &Hello) -> bool {
        super::super::Membership::is_skewed(self.now().wall_ms, hello.wall_ms)
    }

    fn clock(&self, hello: &Hello) -> Finding {
        let own = self.now().wall_ms;
        let seconds = own.abs_diff(hello.wall_ms) as f64 / 1000.0;
        let which = if hello.wall_ms > own {
            "ahead"
        } else {
            "behind"
        };
        let found = match seconds < 1.0 {
            true => "the clocks agree".to_owned(),
            false => format!(
                "the clock of {} is {seconds:.0} s {which}, allowed are {} s",
                hello.name,
                SKEW_MAX.as_secs()
            ),
        };
        Finding::new(Test::Clock, !self.is_off(hello), found)
    }

    fn examine_peer(
        &self,
        session: NodeSession,
        found: &mut dyn FnMut(Finding),
    ) -> Result<(), Error> {
        let peer = session.peer_addr().map_err(session::Error::Broken)?.ip();
        let name = session.hello().name.clone();
        let channel = channel::ask(session, SERVICE, LIMIT)?;
        let own = self.port;
        let back = match ask(&channel, &DiagnosticRequest::Back, LIMIT * 2)? {
            DiagnosticResponse::Reached(None) => Finding::new(
                Test::ControlBack,
                true,
                format!("{name} reaches control port {own} here"),
            ),
            DiagnosticResponse::Reached(Some(why)) => Finding::new(
                Test::ControlBack,
                false,
                format!("{name} does not reach control port {own} here: {why}"),
            ),
            _ => return Err(session::Error::Protocol.into()),
        };
        found(back.at(own));
        self.test_data(&channel, peer, &name, found)?;
        self.test_multicast(&channel, &name, found)?;
        found(self.test_bulk(&channel, &name)?);
        Ok(())
    }

    fn test_data(
        &self,
        channel: &ServiceChannel,
        peer: IpAddr,
        name: &str,
        found: &mut dyn FnMut(Finding),
    ) -> Result<(), Error> {
        let place = match ask(channel, &DiagnosticRequest::Listen, LIMIT)? {
            DiagnosticResponse::Listens(listens) => listens
                .map(|port| with_port(channel, peer, port))
                .map_err(|why| format!("{name} has no data port: {why}")),
            DiagnosticResponse::ListensAt(addr) => Ok(self.by_own_interface(channel, addr)),
            _ => return Err(session::Error::Protocol.into()),
        };
        found(match place {
            Ok(place) => test_place(place?, name),
            Err(why) => Finding::new(Test::Data, false, why),
        });
        self.test_data_back(channel, name, found)
    }

    fn test_data_back(
        &self,
        channel: &ServiceChannel,
        name: &str,
        found: &mut dyn FnMut(Finding),
    ) -> Result<(), Error> {
        let (listener, addr) = match self.listen_once() {
            Ok(listens) => listens,
            Err(why) => {
                found(Finding::new(Test::DataBack, false, why));
                return Ok(());
            }
        };
        let port = addr.port();
        let request = match addr.ip().is_unspecified() {
            true => DiagnosticRequest::Connect(port),
            false => DiagnosticRequest::ConnectAt(addr),
        };
        let answer = ask(channel, &request, LIMIT * 2)?;
        drop(listener);
        let finding = match answer {
            DiagnosticResponse::Reached(None) => Finding::new(
                Test::DataBack,
                true,
                format!("{name} reaches data port {port} here"),
            ),
            DiagnosticResponse::Reached(Some(why)) => Finding::new(
                Test::DataBack,
                false,
                format!("{name} does not reach data port {port} here: {why}"),
            ),
            _ => return Err(session::Error::Protocol.into()),
        };
        found(finding.at(port));
        Ok(())
    }

    /// Listens at an allowed data port, on the data interface.
    fn listen_once(&self) -> Result<(TcpListener, SocketAddr), String> {
        let addr = listen_address(self.config.data_interface.as_deref());
        let addr = addr.map_err(|error| error.to_string())?;
        let ports = self.config.data_ports.clone();
        let listener = listen_within(addr, ports).map_err(|error| error.to_string())?;
        let addr = listener.local_addr().map_err(|error| error.to_string())?;
        Ok((listener, addr))
    }

    /// A data address of the peer as this machine reaches it. A link-local address needs an
    /// interface, whose number differs between machines: this node's data interface, else that of
    /// the channel.
    fn by_own_interface(
        &self,
        channel: &ServiceChannel,
        mut addr: SocketAddr,
    ) -> Result<SocketAddr, Error> {
        let scope = |addr: SocketAddr| match addr {
            SocketAddr::V6(addr) => addr.scope_id(),
            SocketAddr::V4(_) => 0,
        };
        if let SocketAddr::V6(addr) = &mut addr
            && addr.ip().is_unicast_link_local()
        {
            let own = listen_address(self.config.data_interface.as_deref()).map_or(0, scope);
            let shared = scope(channel.peer_addr()?);
            addr.set_scope_id(if own == 0 { shared } else { own });
        }
        Ok(addr)
    }

    fn test_multicast(
        &self,
        channel: &ServiceChannel,
        name: &str,
        found: &mut dyn FnMut(Finding),
    ) -> Result<(), Error> {
        let nonce = random();
        let heard = Probe::open().map(|mut probe| {
            let asked = ask(channel, &DiagnosticRequest::Say(nonce), LIMIT);
            asked.map(|_| probe.hear(nonce, HEAR))
        });
        found(match heard {
            Ok(heard) => multicast(Test::Multicast, &heard?, &format!("from {name}")),
            Err(error) => Finding::new(Test::Multicast, false, error.to_string()),
        });
        let nonce = random();
        ask(channel, &DiagnosticRequest::Hear(nonce), LIMIT)?;
        let said = Probe::open().map(|mut probe| probe.say(nonce));
        let heard = read(channel, HEAR + LIMIT)?;
        found(match (said, heard) {
            (Err(error), _) => Finding::new(Test::MulticastBack, false, error.to_string()),
            (Ok(()), DiagnosticResponse::Heard(heard)) => {
                multicast(Test::MulticastBack, &heard, &format!("from here to {name}"))
            }
            _ => return Err(session::Error::Protocol.into()),
        });
        Ok(())
    }

    fn test_bulk(&self, channel: &ServiceChannel, name: &str) -> Result<Finding, Error> {
        let stalled = |direction: &str| {
            let text = format!("large packets do not pass {direction}: they are lost on the way");
            Ok(Finding::new(Test::Mtu, false, text))
        };
        tell(channel, &DiagnosticRequest::Bulk(BULK_BYTES))?;
        let sent = channel.send(&vec![0; BULK_BYTES]);
        let answer = sent.and_then(|()| read(channel, LIMIT * 2));
        let Ok(DiagnosticResponse::Segment {
            bytes,
            interface,
            mtu,
        }) = answer
        else {
            return stalled(&format!("from here to {name}"));
        };
        if channel.recv(BULK_BYTES, LIMIT * 2)?.is_none() {
            return stalled(&format!("from {name} to here"));
        }
        let own = segment(channel);
        let sides = [(true, own), (false, (bytes, interface, mtu))];
        Ok(judge_mtu(channel, name, sides))
    }

    pub(super) fn answer_examiner(&self, channel: &ServiceChannel) {
        let deadline = Instant::now() + SERVE_LIMIT;
        let mut kept = None;
        while Instant::now() < deadline && !self.is_stopped() {
            let Ok(request) = read(channel, SERVE_LIMIT) else {
                return;
            };
            if self.answer_one(channel, request, &mut kept).is_err() {
                return;
            }
        }
    }

    fn answer_one(
        &self,
        channel: &ServiceChannel,
        request: DiagnosticRequest,
        kept: &mut Option<TcpListener>,
    ) -> Result<(), Error> {
        let peer = channel.peer_addr()?.ip();
        match request {
            DiagnosticRequest::Back => {
                let port = channel.session.hello().port;
                let reached = connect(with_port(channel, peer, port)?);
                tell(channel, &DiagnosticResponse::Reached(reached.err()))
            }
            DiagnosticRequest::Listen => {
                let listened = self.listen_once();
                let answer = match &listened {
                    Ok((_, addr)) if !addr.ip().is_unspecified() => {
                        DiagnosticResponse::ListensAt(*addr)
                    }
                    Ok((_, addr)) => DiagnosticResponse::Listens(Ok(addr.port())),
                    Err(why) => DiagnosticResponse::Listens(Err(why.clone())),
                };
                // Without accept: a connection is established before it.
                *kept = listened.ok().map(|(listener, _)| listener);
                tell(channel, &answer)
            }
            DiagnosticRequest::Connect(port) => {
                let reached = connect(with_port(channel, peer, port)?);
                tell(channel, &DiagnosticResponse::Reached(reached.err()))
            }
            DiagnosticRequest::ConnectAt(addr) => {
                let reached = connect(self.by_own_interface(channel, addr)?);
                tell(channel, &DiagnosticResponse::Reached(reached.err()))
            }
            DiagnosticRequest::Say(nonce) => {
                tell(channel, &DiagnosticResponse::Said)?;
                if let Ok(mut probe) = Probe::open() {
                    probe.say(nonce);
                }
                Ok(())
            }
            DiagnosticRequest::Hear(nonce) => {
                let probe = Probe::open();
                tell(channel, &DiagnosticResponse::Said)?;
                let heard = probe.map(|mut probe| probe.hear(nonce, HEAR));
                tell(
                    channel,
                    &DiagnosticResponse::Heard(heard.unwrap_or_default()),
                )
            }
            DiagnosticRequest::Bulk(bytes) => {
                let bytes = bytes.min(BULK_BYTES);
                if channel.recv(bytes, LIMIT * 2)?.is_none() {
                    return Err(session::Error::Late { limit: LIMIT * 2 }.into());
                }
                let (segment_bytes, interface, mtu) = segment(channel);
                let answer = DiagnosticResponse::Segment {
                    bytes: segment_bytes,
                    interface,
                    mtu,
                };
                tell(channel, &answer)?;
                channel.send(&vec![0; bytes])
            }
        }
    }
}

/// Listens at `addr`, at a port of `ports` if given.
pub(super) fn listen_within(
    addr: SocketAddr,
    ports: Option<RangeInclusive<u16>>,
) -> io::Result<TcpListener> {
    let Some(ports) = ports else {
        return TcpListener::bind(addr);
    };
    let mut last = io::ErrorKind::AddrInUse.into();
    for port in ports {
        let mut addr = addr;
        addr.set_port(port);
        match TcpListener::bind(addr) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The peer's address with another port, and with an interface if needed.
fn with_port(channel: &ServiceChannel, peer: IpAddr, port: u16) -> Result<SocketAddr, Error> {
    let mut addr = channel.peer_addr()?;
    debug_assert_eq!(addr.ip(), peer, "a channel's peer stays");
    addr.set_port(port);
    Ok(addr)
}

fn connect(addr: SocketAddr) -> Result<(), String> {
    let connected = TcpStream::connect_timeout(&addr, LIMIT);
    connected.map(drop).map_err(|error| unreached(addr, &error))
}

/// Reads `bytes` as messages of a diagnosis, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<DiagnosticRequest>(bytes);
    let _ = serde_json::from_slice::<DiagnosticResponse>(bytes);
}

fn tell(channel: &ServiceChannel, message: &impl Serialize) -> Result<(), Error> {
    channel.send(&serde_json::to_vec(message).expect("a message is JSON"))
}

fn read<T: DeserializeOwned>(channel: &ServiceChannel, limit: Duration) -> Result<T, Error> {
    let message = channel.recv(channel::OPENING_BYTES_MAX, limit)?;
    let message = message.ok_or(session::Error::Late { limit })?;
    Ok(serde_json::from_slice(&message).map_err(|_| session::Error::Protocol)?)
}

fn ask(
    channel: &ServiceChannel,
    request: &DiagnosticRequest,
    limit: Duration,
) -> Result<DiagnosticResponse, Error> {
    tell(channel, request)?;
    read(channel, limit)
}
