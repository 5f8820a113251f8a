//! Machines and what joins them.

use super::{CHAR, Canvas, width_of};

/// Pixels from the middle of the picture to a node, at least, and for each node.
const RADIUS: f64 = 120.0;
const RADIUS_EACH: f64 = 22.0;

/// Nodes on a circle, with labelled lines between them.
#[derive(Clone, Debug, Default)]
pub struct NetworkDiagram {
    /// Heading: the subject of the picture.
    pub title: String,
    /// Names of the nodes.
    pub nodes: Vec<String>,
    /// Lines between nodes; several between two of them lie side by side.
    pub edges: Vec<Edge>,
}

/// A line between two nodes, which are given by their place among [`NetworkDiagram::nodes`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edge {
    /// Place of its first end.
    pub from: usize,
    /// The other; the same for a line from a node to itself.
    pub to: usize,
    /// Text at its middle.
    pub label: String,
}

impl NetworkDiagram {
    /// The picture. Edges whose ends there are not are left out.
    pub fn svg(&self) -> String {
        let n = self.nodes.len();
        let names = self.nodes.iter().map(|name| CHAR * width_of(name) + 24.0);
        let widest = names.fold(60.0, f64::max);
        let radius = RADIUS + RADIUS_EACH * n as f64;
        let (width, height) = (2.0 * radius + widest + 60.0, 2.0 * radius + 110.0);
        let mut canvas = Canvas::new(width, height, &self.title);
        let middle = (width / 2.0, height / 2.0 + 14.0);
        // From the top, clockwise; two side by side.
        let turn = if n == 2 { 0.5 } else { 0.0 };
        let place = |i: usize| {
            let angle = std::f64::consts::PI * (2.0 * i as f64 / n as f64 - 0.5 - turn);
            (
                middle.0 + radius * angle.cos(),
                middle.1 + radius * angle.sin(),
            )
        };
        let inside = |edge: &&Edge| edge.from < n && edge.to < n;
        let edges: Vec<&Edge> = self.edges.iter().filter(inside).collect();
        for (i, edge) in edges.iter().enumerate() {
            let same = |other: &&&Edge| ends(other) == ends(edge);
            let (all, before) = (edges.iter().filter(same).count(), edges[..i].iter());
            let nth = before.filter(|other| ends(other) == ends(edge)).count();
            let aside = 46.0 * (nth as f64 - (all - 1) as f64 / 2.0);
            let (a, b) = ends(edge);
            draw(&mut canvas, place(a), place(b), aside, &edge.label);
        }
        for (i, name) in self.nodes.iter().enumerate() {
            node(&mut canvas, place(i), name);
        }
        canvas.finish()
    }
}

/// The ends of an edge, the lower first.
fn ends(edge: &Edge) -> (usize, usize) {
    (edge.from.min(edge.to), edge.from.max(edge.to))
}

fn node(canvas: &mut Canvas, (x, y): (f64, f64), name: &str) {
    let width = CHAR * width_of(name) + 24.0;
    canvas.add(&format!(
        "<rect class=\"n\" x=\"{:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"32\" rx=\"6\" \
         stroke-width=\"1.5\"/>",
        x - width / 2.0,
        y - 16.0
    ));
    canvas.text((x, y + 5.0), "t", "middle", name);
}

/// A curve whose middle is `aside` of the straight line; a node's own is a loop over it.
fn draw(canvas: &mut Canvas, a: (f64, f64), b: (f64, f64), aside: f64, label: &str) {
    let (dx, dy) = (b.0 - a.0, b.1 - a.1);
    let long = dx.hypot(dy);
    let (by, path) = if long < 1.0 {
        let up = (a.0 + aside, a.1 - 58.0);
        let path = format!(
            "M{:.1} {:.1}C{:.1} {:.1} {:.1} {:.1} {:.1} {:.1}",
            a.0 - 14.0,
            a.1,
            up.0 - 30.0,
            up.1,
            up.0 + 30.0,
            up.1,
            a.0 + 14.0,
            a.1
        );
        (up, path)
    } else {
        let off = (-dy / long * aside, dx / long * aside);
        let middle = ((a.0 + b.0) / 2.0 + off.0, (a.1 + b.1) / 2.0 + off.1);
        // A quadratic curve passes half-way between its control point and the straight middle.
        let control = (middle.0 + off.0, middle.1 + off.1);
        let path = format!(
            "M{:.1} {:.1}Q{:.1} {:.1} {:.1} {:.1}",
            a.0, a.1, control.0, control.1, b.0, b.1
        );
        (middle, path)
    };
    canvas.add(&format!(
        "<path class=\"e\" d=\"{path}\" fill=\"none\" stroke-width=\"2\"/>"
    ));
    let width = CHAR * width_of(label) + 8.0;
    canvas.add(&format!(
        "<rect class=\"b\" x=\"{:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"18\"/>",
        by.0 - width / 2.0,
        by.1 - 9.0
    ));
    canvas.text((by.0, by.1 + 4.0), "g", "middle", label);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(n: usize, edges: &[(usize, usize)]) -> NetworkDiagram {
        NetworkDiagram {
            title: "cables".to_owned(),
            nodes: (0..n).map(|i| format!("host{i}")).collect(),
            edges: edges
                .iter()
                .map(|(from, to)| Edge {
                    from: *from,
                    to: *to,
                    label: format!("{from}-{to}"),
                })
                .collect(),
        }
    }

    #[test]
    fn every_node_and_edge_is_drawn() {
        for n in 0..9 {
            let edges: Vec<_> = (0..n).flat_map(|a| (0..=a).map(move |b| (a, b))).collect();
            let svg = net(n, &edges).svg();
            assert_eq!(svg.matches("class=\"e\"").count(), edges.len(), "{n}");
            assert_eq!(svg.matches("class=\"n\"").count(), n, "{n}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{n}: {svg}");
        }
        assert_eq!(net(1, &[(0, 1)]).svg().matches("class=\"e\"").count(), 0);
    }

    /// Two cables between two machines, whichever end was listed first.
    #[test]
    fn parallel_edges_lie_side_by_side() {
        let svg = net(2, &[(0, 1), (1, 0)]).svg();
        let paths: Vec<&str> = svg.lines().filter(|l| l.contains("class=\"e\"")).collect();
        assert_eq!(paths.len(), 2);
        assert_ne!(paths[0], paths[1]);
    }
}
