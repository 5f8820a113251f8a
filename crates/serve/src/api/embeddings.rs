//! Embedding requests, computed on a blocking thread that stops when the client has left.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use paceline_engine::{Embedder, RequestFailure};

use super::{App, Endpoint};
use crate::concurrency::ConcurrencyPermit;
use crate::phase::{ServerPhase, reach};
use crate::rejection::Rejection;
use crate::render::embeddings::{EmbeddingStats, body, shorten};
use crate::request::embeddings::EmbeddingRequest;
use crate::response_stream::RequestContext;

/// Sets a flag when dropped: the client left, or the response is complete.
struct DropFlag(Arc<AtomicBool>);

impl Drop for DropFlag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Result of the blocking thread: a vector per text.
type EmbeddingResult = Result<Vec<Vec<f32>>, RequestFailure>;

/// Computes the embeddings of `ask` and responds. The thread holds `place` until it ends.
pub(super) async fn respond(
    app: &Arc<App>,
    ask: EmbeddingRequest,
    mut terms: RequestContext,
    place: ConcurrencyPermit,
) -> Result<Response, Rejection> {
    let over = DropFlag(Arc::default());
    let is_over = Arc::clone(&over.0);
    let tokens = ask.texts.iter().map(Vec::len).sum();
    let (service, texts) = (Arc::clone(&app.service), ask.texts);
    let work = tokio::task::spawn_blocking(move || -> Option<EmbeddingResult> {
        let _place = place;
        let is_over = || is_over.load(Ordering::Relaxed);
        Some(service.embedder()?.embed(&texts, &is_over))
    });
    let limit_s = terms.deadline_s;
    let computed = tokio::select! {
        () = &mut terms.deadline => return Err(Rejection::Deadline { limit_s }),
        () = reach(&mut terms.phase, ServerPhase::Ending) => return Err(Rejection::ShuttingDown),
        computed = work => computed,
    };
    let what = "compute the vectors";
    let computed = computed.map_err(|_| Rejection::Broken { what })?;
    let mut vectors = computed.ok_or(Rejection::Broken { what })??;
    vectors
        .iter_mut()
        .for_each(|vector| shorten(vector, ask.dimensions));
    app.metrics.embedded(tokens);
    let facts = EmbeddingStats {
        model: &app.model.id,
        tokens,
        took: (terms.now)().saturating_duration_since(terms.asked),
    };
    let json = [(CONTENT_TYPE, "application/json")];
    Ok((StatusCode::OK, json, body(&ask.form, &vectors, facts)).into_response())
}

impl App {
    /// The model's encoder.
    ///
    /// # Errors
    /// [`Rejection::NotDone`] where the model generates text.
    pub(super) fn embedder(&self) -> Result<&dyn Embedder, Rejection> {
        self.service.embedder().ok_or(Rejection::NotDone {
            what: "making embeddings",
            why: "the model that is served generates text",
        })
    }

    /// Checks, before the body is read, that the model supports `endpoint`.
    pub(super) fn check_ability(&self, endpoint: Endpoint) -> Result<(), Rejection> {
        if endpoint.embeds() {
            return self.embedder().map(drop);
        }
        if endpoint.generates() && self.service.embedder().is_some() {
            return Err(Rejection::NotDone {
                what: "generating text",
                why: "the model that is served makes embeddings",
            });
        }
        Ok(())
    }
}

impl Endpoint {
    const fn embeds(self) -> bool {
        matches!(
            self,
            Self::Embeddings | Self::OllamaEmbed | Self::OllamaEmbeddings
        )
    }

    const fn generates(self) -> bool {
        matches!(
            self,
            Self::Chat
                | Self::Completion
                | Self::Response
                | Self::Message
                | Self::OllamaChat
                | Self::OllamaGenerate
                | Self::Infill
        )
    }
}
