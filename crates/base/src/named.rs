//! Enums whose variants have names: [`named_enum!`](crate::named_enum).

/// Declares an enum without fields, each variant with its name, and gives it `ALL`, `name`,
/// `from_name` and `Display`.
///
/// ```
/// paceline_base::named_enum! {
///     #[derive(Clone, Copy, Debug, PartialEq)]
///     pub enum Colour {
///         Red = "red",
///         Blue = "blue",
///     }
/// }
/// assert_eq!(Colour::from_name("blue"), Some(Colour::Blue));
/// assert_eq!(Colour::ALL.map(Colour::name), ["red", "blue"]);
/// ```
#[macro_export]
macro_rules! named_enum {
    ($(#[$meta:meta])* $visible:vis enum $type:ident {
        $($(#[$note:meta])* $variant:ident = $name:literal,)*
    }) => {
        $(#[$meta])*
        $visible enum $type {
            $($(#[$note])* $variant,)*
        }

        impl $type {
            /// All of them, in the order of the declaration.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// The name used in options and results.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// The variant with this name.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|one| one.name() == name)
            }
        }

        impl ::core::fmt::Display for $type {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
