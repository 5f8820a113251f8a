//! Line charts.

use super::{Canvas, LINE, colour, dash};

/// The rectangle of the lines, in pixels.
const LEFT: f64 = 72.0;
const WIDE: f64 = 620.0;
const HIGH: f64 = 300.0;

/// Marks on an axis, about.
const MARKS: usize = 6;

/// Lines over two axes.
#[derive(Clone, Debug)]
pub struct LineChart {
    /// Heading: the subject of the lines.
    pub title: String,
    /// From left to right.
    pub x: Axis,
    /// From bottom to top.
    pub y: Axis,
    pub series: Vec<Series>,
}

#[derive(Clone, Copy, Debug)]
pub struct Axis {
    /// Quantity and unit.
    pub label: &'static str,
    pub scale: Scale,
    /// A value as text.
    pub format: fn(f64) -> String,
}

/// Distribution of values over an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Evenly, from 0 where no value is below.
    Linear,
    /// By their logarithm; values up to 0 are left out.
    Log,
}

/// A line.
#[derive(Clone, Debug, Default)]
pub struct Series {
    pub name: String,
    /// In order.
    pub points: Vec<(f64, f64)>,
    /// Whether it is drawn dashed, as predictions are.
    pub dashed: bool,
}

/// The range of an axis, in the unit in which it is even.
#[derive(Clone, Copy, Debug)]
struct Range {
    scale: Scale,
    low: f64,
    high: f64,
}

impl Range {
    fn of(scale: Scale, values: impl Iterator<Item = f64>) -> Self {
        let values = values.filter_map(|value| even(scale, value));
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        let low = if scale == Scale::Linear {
            low.min(0.0)
        } else {
            low
        };
        match low < high {
            true => Self { scale, low, high },
            false if low.is_finite() => Self {
                scale,
                low: low - 0.5,
                high: low + 0.5,
            },
            false => Self {
                scale,
                low: 0.0,
                high: 1.0,
            },
        }
    }

    /// Position of a value on the axis, 0 to 1.
    fn place(&self, value: f64) -> Option<f64> {
        Some((even(self.scale, value)? - self.low) / (self.high - self.low))
    }

    /// Values to mark.
    fn marks(&self) -> Vec<f64> {
        let step = match self.scale {
            Scale::Linear => nice((self.high - self.low) / MARKS as f64),
            Scale::Log => ((self.high - self.low) / MARKS as f64).ceil().max(1.0),
        };
        let first = (self.low / step).ceil() as i64;
        let last = (self.high / step + 1e-9).floor() as i64;
        let value = |i: i64| match self.scale {
            Scale::Linear => i as f64 * step,
            Scale::Log => (i as f64 * step).exp2(),
        };
        (first..=last).map(value).collect()
    }
}

/// A value in the unit in which its axis is even: logarithms are of base 2.
fn even(scale: Scale, value: f64) -> Option<f64> {
    let even = match scale {
        Scale::Linear => value,
        Scale::Log => value.log2(),
    };
    even.is_finite().then_some(even)
}

/// 1, 2 or 5 times a power of ten, at least `step`.
fn nice(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    let times = [1.0, 2.0, 5.0, 10.0];
    let found = times.into_iter().find(|times| times * power >= step);
    found.unwrap_or(10.0) * power
}

impl LineChart {
    /// The picture.
    pub fn svg(&self) -> String {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let x = Range::of(self.x.scale, points().map(|point| point.0));
        let y = Range::of(self.y.scale, points().map(|point| point.1));
        let top = 62.0 + if self.series.len() > 1 { LINE } else { 0.0 };
        let (bottom, right) = (top + HIGH, LEFT + WIDE);
        let mut canvas = Canvas::new(right + 24.0, bottom + 52.0, &self.title);
        let names = self
            .series
            .iter()
            .map(|series| (series.name.clone(), series.dashed));
        canvas.legend((16.0, 48.0), &names.collect::<Vec<_>>());
        let at_x = |value: f64| Some(LEFT + WIDE * x.place(value)?);
        let at_y = |value: f64| Some(bottom - HIGH * y.place(value)?);
        for value in y.marks() {
            let Some(at) = at_y(value) else { continue };
            canvas.add(&format!(
                "<path class=\"l\" d=\"M{LEFT} {at:.1}H{right}\"/>"
            ));
            canvas.text((LEFT - 8.0, at + 4.0), "g", "end", &(self.y.format)(value));
        }
        for value in x.marks() {
            let Some(at) = at_x(value) else { continue };
            canvas.add(&format!(
                "<path class=\"l\" d=\"M{at:.1} {top}V{bottom}\"/>"
            ));
            canvas.text((at, bottom + 18.0), "g", "middle", &(self.x.format)(value));
        }
        canvas.text((right, bottom + 40.0), "t", "end", self.x.label);
        canvas.text((16.0, top - 8.0), "t", "start", self.y.label);
        for (i, series) in self.series.iter().enumerate() {
            let points = series.points.iter();
            let places = points.filter_map(|(x, y)| Some((at_x(*x)?, at_y(*y)?)));
            draw(
                &mut canvas,
                &places.collect::<Vec<_>>(),
                colour(i),
                series.dashed,
            );
        }
        canvas.finish()
    }
}

/// A line with a dot at each point, unless there are many.
fn draw(canvas: &mut Canvas, points: &[(f64, f64)], colour: &str, dashed: bool) {
    let text: Vec<String> = points
        .iter()
        .map(|(x, y)| format!("{x:.1},{y:.1}"))
        .collect();
    let (text, dash) = (text.join(" "), dash(dashed));
    canvas.add(&format!(
        "<polyline points=\"{text}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>"
    ));
    let few = points.iter().filter(|_| points.len() <= 40);
    for (x, y) in few {
        canvas.add(&format!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(label: &'static str, scale: Scale) -> Axis {
        let format = super::super::short;
        Axis {
            label,
            scale,
            format,
        }
    }

    #[test]
    fn marks_are_round() {
        let linear = Range::of(Scale::Linear, [3.0, 57.0].into_iter());
        assert_eq!(linear.marks(), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]);
        let log = Range::of(Scale::Log, [4.0, 4096.0].into_iter());
        assert_eq!(log.marks(), [4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0]);
        assert_eq!(nice(0.3), 0.5);
        assert_eq!(nice(7.0), 10.0);
    }

    #[test]
    fn points_lie_where_their_values_are() {
        let lines = LineChart {
            title: "latency".to_owned(),
            x: axis("bytes", Scale::Log),
            y: axis("us", Scale::Linear),
            series: vec![Series {
                name: "measured".to_owned(),
                points: vec![(1.0, 0.0), (4.0, 10.0), (0.0, 5.0), (16.0, f64::NAN)],
                dashed: true,
            }],
        };
        let svg = lines.svg();
        // Left and low, and in the middle of 1 to 16 and high; what has no place is left out.
        assert!(svg.contains("points=\"72.0,362.0 382.0,62.0\""), "{svg}");
        assert!(svg.contains("stroke-dasharray"), "{svg}");
    }

    #[test]
    fn no_points_and_one_value_make_pictures() {
        for points in [vec![], vec![(1.0, 1.0)], vec![(1.0, f64::INFINITY)]] {
            let series = vec![Series {
                points,
                ..Series::default()
            }];
            for scale in [Scale::Linear, Scale::Log] {
                let (x, y) = (axis("x", scale), axis("y", scale));
                let title = String::new();
                let lines = LineChart {
                    title,
                    x,
                    y,
                    series: series.clone(),
                };
                assert!(!lines.svg().contains("NaN"), "{}", lines.svg());
            }
        }
    }
}
