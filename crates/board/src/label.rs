//! Labels of metrics in the text form of Prometheus.

/// A label of a metric; escapes the value.
pub(crate) fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"");
    format!("{name}=\"{}\"", value.replace('\n', "\\n"))
}
