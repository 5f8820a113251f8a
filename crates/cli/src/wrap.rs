//! Long lines of help and tables, wrapped to a terminal's width with a hanging indent.

/// Narrowest terminal that text is wrapped for.
const COLUMNS_MIN: usize = 40;

/// Beginnings of lines that are commands to copy, which stay whole.
const COMMANDS: [&str; 3] = ["paceline ", "curl ", "PACELINE_"];

/// `text` with lines of at most `columns` columns, as far as its words allow. Escape sequences of
/// colours take no columns.
pub(crate) fn wrapped(text: &str, columns: usize) -> String {
    if columns < COLUMNS_MIN {
        return text.to_owned();
    }
    let lines: Vec<String> = text.split('\n').map(|line| one(line, columns)).collect();
    lines.join("\n")
}

fn one(line: &str, columns: usize) -> String {
    let is_command = COMMANDS
        .iter()
        .any(|command| line.trim_start().starts_with(command));
    if is_command || width(line) <= columns {
        return line.to_owned();
    }
    let indent = " ".repeat(indent(line, columns));
    let lead = line.len() - line.trim_start().len();
    let mut out = line[..lead].to_owned();
    let mut at = lead;
    // Spaces within a line, as between an option and its text, stay as they are.
    for word in line[lead..].split_inclusive(' ') {
        let taken = width(word.trim_end());
        if at + taken > columns && at > indent.len() {
            out.truncate(out.trim_end().len());
            out.push('\n');
            out.push_str(&indent);
            at = indent.len();
        }
        out.push_str(word);
        at += width(word);
    }
    out
}

/// Columns of a text without escape sequences, which end with a letter.
fn width(text: &str) -> usize {
    let (mut columns, mut is_escape) = (0, false);
    for c in text.chars() {
        match (is_escape, c) {
            (false, '\u{1b}') => is_escape = true,
            (false, _) => columns += 1,
            (true, c) => is_escape = !c.is_ascii_alphabetic(),
        }
    }
    columns
}

/// Column at which continued lines begin: the last column of a table in the first half of the
/// terminal, else the line's own indent.
fn indent(line: &str, columns: usize) -> usize {
    let lead = line.len() - line.trim_start().len();
    let (mut found, mut from) = (lead, lead);
    while let Some(gap) = line[from..].find("  ") {
        let start = from + gap;
        let next = start + (line[start..].len() - line[start..].trim_start().len());
        let column = width(&line[..next]);
        if next >= line.len() || column > columns / 2 {
            break;
        }
        (found, from) = (column, next);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_hang_under_their_text_and_commands_stay_whole() {
        let text = "A sentence of some words that is far too long for forty columns\n  \
                    -n, --nodes <N>  How many machines compute it, or their names\n  \
                    paceline load smollm2 --nodes 3 --split pipeline --preview";
        assert_eq!(
            wrapped(text, 40),
            "A sentence of some words that is far too\nlong for forty columns\n  \
             -n, --nodes <N>  How many machines\n                   compute it, or their\n                   \
             names\n  paceline load smollm2 --nodes 3 --split pipeline --preview"
        );
        assert_eq!(wrapped(text, 20), text, "no terminal is that narrow");
    }

    #[test]
    fn colours_take_no_columns() {
        let text = "\u{1b}[1mbold\u{1b}[0m and ten words that fit into 40 cols";
        assert_eq!(wrapped(text, 40), text);
    }
}
