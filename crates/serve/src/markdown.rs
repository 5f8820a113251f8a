//! Markdown of models as data: trees from which the dashboard makes its own elements.
//!
//! The page never gets HTML. Raw HTML stays text, images become links, and only links to `http`,
//! `https` and `mailto` have an address. [`tree`] bounds the text, the nodes and their depth.

use pulldown_cmark::{Alignment, CodeBlockKind, Event, HeadingLevel, Options, Parser, Tag};
use serde::Serialize;

/// Maximum parsed text: longer than any model's answer of 32,000 tokens.
const TEXT_BYTES_MAX: usize = 128 << 10;

/// Maximum bytes of a line: browsers take long to lay out a longer one.
const LINE_BYTES_MAX: usize = 16 << 10;

/// Maximum elements and texts: what a browser adds to a page in less than 50 ms.
const NODES_MAX: usize = 3_000;

/// Maximum depth of elements; deeper ones are merged into their parents.
pub(crate) const DEPTH_MAX: usize = 24;

/// Schemes of links that keep their address.
pub(crate) const SCHEMES: [&str; 3] = ["http://", "https://", "mailto:"];

/// A text or an element.
#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(crate) enum Node {
    Text(String),
    Element(Element),
}

#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct Element {
    /// Name of the element in HTML.
    tag: &'static str,
    /// Address of a link.
    #[serde(skip_serializing_if = "Option::is_none")]
    href: Option<String>,
    /// Language of a code block.
    #[serde(skip_serializing_if = "Option::is_none")]
    lang: Option<String>,
    /// First number of a list.
    #[serde(skip_serializing_if = "Option::is_none")]
    start: Option<u64>,
    /// Alignment of a cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    align: Option<&'static str>,
    children: Vec<Node>,
}

impl Element {
    fn new(tag: &'static str) -> Self {
        Self {
            tag,
            ..Self::default()
        }
    }
}

/// The tree of a text. `None` if it is too long, or has too long lines or too many parts: such text
/// is shown plain.
pub(crate) fn tree(text: &str) -> Option<Vec<Node>> {
    let has_long_line = text.split('\n').any(|line| line.len() > LINE_BYTES_MAX);
    if text.len() > TEXT_BYTES_MAX || has_long_line {
        return None;
    }
    let options =
        Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH | Options::ENABLE_TASKLISTS;
    let mut builder = TreeBuilder::default();
    for event in Parser::new_ext(text, options) {
        builder.add(event);
        if builder.nodes > NODES_MAX {
            return None;
        }
    }
    Some(builder.root.children)
}

/// Collects the events of the parser.
#[derive(Default)]
struct TreeBuilder {
    root: Element,
    /// Open elements, outermost first.
    open: Vec<Element>,
    /// Alignments of the current table's columns.
    columns: Vec<Alignment>,
    /// Column of the next cell.
    column: usize,
    in_head: bool,
    nodes: usize,
}

impl TreeBuilder {
    fn add(&mut self, event: Event<'_>) {
        match event {
            Event::Start(tag) => {
                let element = self.element(tag);
                self.open.push(element);
            }
            Event::End(_) => self.close(),
            Event::Text(text) | Event::Html(text) | Event::InlineHtml(text) => self.text(&text),
            Event::Code(text) => {
                self.open.push(Element::new("code"));
                self.text(&text);
                self.close();
            }
            Event::SoftBreak => self.text("\n"),
            Event::HardBreak => self.empty("br"),
            Event::Rule => self.empty("hr"),
            Event::TaskListMarker(done) => self.text(if done { "☑ " } else { "☐ " }),
            // Not enabled.
            Event::FootnoteReference(text) | Event::InlineMath(text) | Event::DisplayMath(text) => {
                self.text(&text)
            }
        }
    }

    fn element(&mut self, tag: Tag<'_>) -> Element {
        let name = match &tag {
            Tag::Heading { level, .. } => heading(*level),
            Tag::BlockQuote(_) => "blockquote",
            Tag::CodeBlock(_) => "pre",
            Tag::List(None) => "ul",
            Tag::List(Some(_)) => "ol",
            Tag::Item => "li",
            Tag::Table(_) => "table",
            Tag::TableHead | Tag::TableRow => "tr",
            Tag::TableCell if self.in_head => "th",
            Tag::TableCell => "td",
            Tag::Emphasis => "em",
            Tag::Strong => "strong",
            Tag::Strikethrough => "del",
            Tag::Link { .. } | Tag::Image { .. } => "a",
            _ => "p",
        };
        let mut element = Element::new(name);
        match tag {
            Tag::CodeBlock(CodeBlockKind::Fenced(lang)) => {
                let lang = lang.split_whitespace().next().unwrap_or_default();
                element.lang = (!lang.is_empty()).then(|| crate::schema::clip(lang));
            }
            Tag::List(start) => element.start = start,
            Tag::Table(columns) => self.columns = columns,
            Tag::TableHead => (self.in_head, self.column) = (true, 0),
            Tag::TableRow => (self.in_head, self.column) = (false, 0),
            Tag::TableCell => {
                element.align = self.columns.get(self.column).and_then(|it| side(*it));
                self.column += 1;
            }
            Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. } => {
                element.href = address(&dest_url);
            }
            _ => {}
        }
        element
    }

    /// Ends the innermost element. A tree of the greatest depth takes its children only.
    fn close(&mut self) {
        let Some(element) = self.open.pop() else {
            return;
        };
        if self.open.len() < DEPTH_MAX {
            return self.put(Node::Element(element));
        }
        for child in element.children {
            self.put(child);
        }
    }

    /// Adds an element without children; a line's end in a tree of the greatest depth.
    fn empty(&mut self, tag: &'static str) {
        match self.open.len() < DEPTH_MAX {
            true => self.put(Node::Element(Element::new(tag))),
            false => self.text("\n"),
        }
    }

    fn text(&mut self, text: &str) {
        if let Some(Node::Text(last)) = self.children().last_mut() {
            last.push_str(text);
        } else {
            self.put(Node::Text(text.to_owned()));
        }
    }

    fn put(&mut self, node: Node) {
        self.nodes += 1;
        self.children().push(node);
    }

    fn children(&mut self) -> &mut Vec<Node> {
        let open = self.open.last_mut();
        &mut open.unwrap_or(&mut self.root).children
    }
}

/// The page's own headings are the first two levels.
const fn heading(level: HeadingLevel) -> &'static str {
    match level {
        HeadingLevel::H1 => "h3",
        HeadingLevel::H2 => "h4",
        HeadingLevel::H3 => "h5",
        _ => "h6",
    }
}

const fn side(alignment: Alignment) -> Option<&'static str> {
    match alignment {
        Alignment::None => None,
        Alignment::Left => Some("left"),
        Alignment::Center => Some("center"),
        Alignment::Right => Some("right"),
    }
}

/// The address of a link, if its scheme is one of [`SCHEMES`].
fn address(url: &str) -> Option<String> {
    let is_known = |scheme: &&str| {
        let start = url.get(..scheme.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    };
    let has_control = url.contains(char::is_control);
    (!has_control && SCHEMES.iter().any(is_known)).then(|| url.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(text: &str) -> serde_json::Value {
        json!(tree(text))
    }

    #[test]
    fn a_text_has_its_parts() {
        let text = "# A\n*b* **c** `d`\n\n```rust x\nlet e;\n```\n3. f\n   - [x] g\n\n|h|i|\n|-|:-:|\n|j|k|\n";
        let p = |children: serde_json::Value| json!({ "tag": "p", "children": children });
        let of = |tag: &str, text: &str| json!({ "tag": tag, "children": [text] });
        let cell =
            |tag: &str, text: &str| json!({ "tag": tag, "align": "center", "children": [text] });
        let nested = json!({ "tag": "ul", "children": [of("li", "☑ g")] });
        let rows = [
            json!({ "tag": "tr", "children": [of("th", "h"), cell("th", "i")] }),
            json!({ "tag": "tr", "children": [of("td", "j"), cell("td", "k")] }),
        ];
        assert_eq!(
            told(text),
            json!([
                of("h3", "A"),
                p(json!([of("em", "b"), " ", of("strong", "c"), " ", of("code", "d")])),
                { "tag": "pre", "lang": "rust", "children": ["let e;\n"] },
                { "tag": "ol", "start": 3, "children": [
                    { "tag": "li", "children": ["f", nested] }
                ] },
                { "tag": "table", "children": rows },
            ])
        );
    }

    #[test]
    fn html_is_text_and_only_links_to_the_web_have_an_address() {
        let html = "<script>a()</script>\n\nx <svg onload=a()> <img src=x onerror=a()>";
        let text = told(html).to_string();
        assert!(
            text.contains("<script>") && text.contains("<svg onload"),
            "{text}"
        );
        assert!(
            !text.contains("\"tag\":\"s") && !text.contains("\"tag\":\"i"),
            "{text}"
        );
        for (url, kept) in [
            ("https://a.example/x", true),
            ("MAILTO:a@b.example", true),
            ("javascript:alert(1)", false),
            ("data:text/html;base64,PHNjcmlwdD4=", false),
            ("vbscript:x", false),
            ("//a.example", false),
            ("/v1/paceline/status", false),
            ("hé", false),
        ] {
            for mark in ["", "!"] {
                let told = told(&format!("{mark}[a]({url})"));
                let href = told[0]["children"][0]["href"].is_string();
                assert_eq!(href, kept, "{mark}{url}: {told}");
            }
        }
    }

    #[test]
    fn depth_and_size_are_bounded() {
        fn depth(nodes: &[Node]) -> usize {
            let of = |node: &Node| match node {
                Node::Text(_) => 0,
                Node::Element(element) => 1 + depth(&element.children),
            };
            nodes.iter().map(of).max().unwrap_or(0)
        }
        for inner in ["x", "x  \ny"] {
            let deep = tree(&format!("{}{inner}", "> ".repeat(2_000))).unwrap();
            assert_eq!(depth(&deep), DEPTH_MAX, "{inner:?}");
        }
        assert_eq!(tree(&"*a* ".repeat(NODES_MAX)), None);
        assert_eq!(tree(&"x\n".repeat(TEXT_BYTES_MAX / 2 + 1)), None);
        assert_eq!(tree(&"x".repeat(LINE_BYTES_MAX + 1)), None);
        assert!(tree(&"[".repeat(LINE_BYTES_MAX)).is_some());
    }
}
