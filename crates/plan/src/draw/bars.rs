//! Rows of bars from the left.

use super::{CHAR, Canvas, LINE, colour, short, width_of};

/// Pixels of the longest bar.
const LONGEST: f64 = 380.0;

/// Pixels of a bar's height, and between two rows.
const THICK: f64 = 16.0;
const GAP: f64 = 14.0;

/// Most pixels for the labels of rows.
const LABEL_MAX: f64 = 360.0;

/// Rows of bars with their values behind them. The longest bar is the largest value.
#[derive(Clone, Debug, Default)]
pub struct BarChart {
    /// Heading: the quantity of the values, with its unit.
    pub title: String,
    /// Names of the values of a row.
    pub series: Vec<String>,
    /// From top to bottom.
    pub rows: Vec<Bar>,
}

/// A row: a bar for each series.
#[derive(Clone, Debug, Default)]
pub struct Bar {
    /// Text before it.
    pub label: String,
    /// In the order of [`BarChart::series`]; none where there is no value. No value is below 0.
    pub values: Vec<Option<f64>>,
    /// Text behind the values; may be empty.
    pub note: String,
}

impl BarChart {
    /// The picture. Values that are no finite number have no bar.
    pub fn svg(&self) -> String {
        let labels = self.rows.iter().map(|row| CHAR * width_of(&row.label));
        let left = 28.0 + labels.fold(40.0, f64::max).min(LABEL_MAX);
        let notes = self.rows.iter().map(|row| CHAR * width_of(&row.note));
        let width = left + LONGEST + 84.0 + notes.fold(0.0, f64::max);
        let legend = if self.series.len() > 1 {
            LINE + 6.0
        } else {
            0.0
        };
        let top = 44.0 + legend;
        let each = THICK * self.series.len().max(1) as f64 + GAP;
        let height = top + each * self.rows.len() as f64 + 8.0;
        let mut canvas = Canvas::new(width, height, &self.title);
        let names: Vec<_> = self
            .series
            .iter()
            .map(|name| (name.clone(), false))
            .collect();
        canvas.legend((16.0, 48.0), &names);
        let all = self.rows.iter().flat_map(|row| row.values.iter().flatten());
        let finite = all.copied().filter(|value| value.is_finite());
        let most = finite.fold(f64::MIN_POSITIVE, f64::max);
        for (i, row) in self.rows.iter().enumerate() {
            row.draw(&mut canvas, (left, top + each * i as f64), most);
        }
        canvas.finish()
    }
}

impl Bar {
    fn draw(&self, canvas: &mut Canvas, (left, top): (f64, f64), most: f64) {
        let middle = top + THICK * self.values.len() as f64 / 2.0 + 5.0;
        canvas.text((left - 10.0, middle), "t", "end", &self.label);
        let mut widest = 0.0_f64;
        for (i, value) in self.values.iter().enumerate() {
            let Some(value) = value.filter(|value| value.is_finite()) else {
                continue;
            };
            let (y, long) = (top + THICK * i as f64, LONGEST * value.max(0.0) / most);
            let (colour, thick, text) = (colour(i), THICK - 2.0, short(value));
            canvas.add(&format!(
                "<rect x=\"{left:.1}\" y=\"{y:.1}\" width=\"{long:.1}\" height=\"{thick:.1}\" \
                 fill=\"{colour}\"/>"
            ));
            canvas.text((left + long + 6.0, y + 12.0), "t", "start", &text);
            widest = widest.max(long + 14.0 + CHAR * width_of(&text));
        }
        canvas.text((left + widest + 6.0, middle), "g", "start", &self.note);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_value_is_the_longest_bar_and_what_is_missing_has_none() {
        let row = |label: &str, values: [Option<f64>; 2]| Bar {
            label: label.to_owned(),
            values: values.to_vec(),
            note: "W".to_owned(),
        };
        let bars = BarChart {
            title: "speed".to_owned(),
            series: vec!["one".to_owned(), "all".to_owned()],
            rows: vec![
                row("a", [Some(5.0), Some(20.0)]),
                row("b", [None, Some(f64::NAN)]),
            ],
        };
        let svg = bars.svg();
        let widths: Vec<&str> = svg
            .lines()
            .filter(|line| line.starts_with("<rect x="))
            .map(|line| line.split('"').nth(5).unwrap())
            .collect();
        assert_eq!(widths, ["95.0", "380.0"], "{svg}");
        for text in [">a<", ">b<", ">one<", ">all<", ">5<", ">20<", ">W<"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
    }

    #[test]
    fn no_rows_and_all_zero_make_pictures() {
        assert!(BarChart::default().svg().ends_with("</svg>\n"));
        let zero = BarChart {
            rows: vec![Bar {
                values: vec![Some(0.0)],
                ..Bar::default()
            }],
            ..BarChart::default()
        };
        assert!(zero.svg().contains("width=\"0.0\""));
    }
}
