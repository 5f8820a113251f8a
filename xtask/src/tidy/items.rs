//! Rules on items: errors have types, the control plane's structs one mutex each, and types names
//! of their own.

use std::collections::BTreeMap;

use syn::spanned::Spanned;
use syn::visit::Visit;
use syn::{GenericArgument, PathArguments, Type, Visibility};

use super::{RustFile, TidyFinding};
use crate::repo;

/// Crates whose structs have one mutex over one state, so that no order of locks matters.
const CONTROL_PLANE: [&str; 4] = ["board", "cluster", "fleet", "node"];

/// Types of one name over the tree: a third one needs a name of its own.
const NAMESAKES_MAX: usize = 2;

/// Words of the field that any module may have a type of, because its path says which.
#[rustfmt::skip]
const SHARED_NAMES: [&str; 24] = [
    // Rust's and this tree's words for parts of a module.
    "Action", "Args", "Command", "Config", "Error", "Event", "FromWorker", "Header", "Inner",
    "Kind", "Options", "Report", "State", "ToWorker",
    // Parts of a model: in its configuration, its weights and those of a device.
    "Compressed", "DeltaNet", "Experts", "Indexer", "Latent", "PoolIndexer",
    // Words of tensors and groups, which differ by library.
    "Backend", "Dtype", "Matrix", "Ring",
];

/// Findings about the items of one file.
pub(crate) fn check(file: &RustFile) -> Vec<TidyFinding> {
    let mut items = Items {
        file,
        findings: Vec::new(),
    };
    if !file.test_file {
        items.visit_file(&file.syntax);
    }
    items.findings
}

/// Findings about names that more than [`NAMESAKES_MAX`] types of the crates have.
pub(crate) fn check_names(files: &[RustFile]) -> Vec<TidyFinding> {
    let mut names = Names::default();
    let is_product = |file: &&RustFile| file.path.starts_with("crates/") && !file.test_file;
    for file in files.iter().filter(is_product) {
        let mut types = Types(Vec::new());
        types.visit_file(&file.syntax);
        for name in types.0 {
            let line = name.span().start().line;
            if !file.is_test(line) {
                let place = (file.path.clone(), line);
                names.entry(name.to_string()).or_default().push(place);
            }
        }
    }
    names.retain(|name, places| places.len() > NAMESAKES_MAX && !SHARED_NAMES.contains(&&**name));
    let finding = |(name, places): (String, Vec<(String, usize)>)| {
        let (path, line) = &places[NAMESAKES_MAX];
        let message = format!("{} types are named {name}", places.len());
        TidyFinding::error(path, *line, "type-name", message)
    };
    names.into_iter().map(finding).collect()
}

/// Places of types by their name.
type Names = BTreeMap<String, Vec<(String, usize)>>;

/// Names of the types of a file.
struct Types(Vec<syn::Ident>);

impl<'ast> Visit<'ast> for Types {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.0.push(item.ident.clone());
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.0.push(item.ident.clone());
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.0.push(item.ident.clone());
        syn::visit::visit_item_trait(self, item);
    }
}

struct Items<'a> {
    file: &'a RustFile,
    findings: Vec<TidyFinding>,
}

impl Items<'_> {
    fn find(&mut self, line: usize, rule: &'static str, message: &str) {
        if !self.file.is_test(line) {
            let finding = TidyFinding::error(&self.file.path, line, rule, message.to_owned());
            self.findings.push(finding);
        }
    }
}

impl<'ast> Visit<'ast> for Items<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if is_public(&item.vis) {
            self.visit_signature(&item.sig);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if is_public(&item.vis) {
            self.visit_signature(&item.sig);
        }
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        if is_public(&item.vis) {
            syn::visit::visit_item_trait(self, item);
        }
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        if is_public(&item.vis) {
            syn::visit::visit_item_enum(self, item);
        }
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        if is_public(&item.vis) {
            syn::visit::visit_item_type(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        let mut locks = Locks(0);
        locks.visit_fields(&item.fields);
        let is_control = CONTROL_PLANE.contains(&repo::crate_of(&self.file.path));
        if is_control && locks.0 > 1 {
            let line = item.ident.span().start().line;
            self.find(
                line,
                "mutexes",
                "more than one mutex: put one over one state",
            );
        }
        let public = item.fields.iter().filter(|field| is_public(&field.vis));
        if is_public(&item.vis) {
            public.for_each(|field| self.visit_type(&field.ty));
        }
    }

    fn visit_path_segment(&mut self, segment: &'ast syn::PathSegment) {
        if let PathArguments::AngleBracketed(arguments) = &segment.arguments
            && segment.ident == "Result"
            && let Some(GenericArgument::Type(Type::Path(error))) = arguments.args.iter().nth(1)
            && error.path.is_ident("String")
        {
            let line = segment.span().start().line;
            self.find(
                line,
                "text-error",
                "a public item fails by text: use a typed error",
            );
        }
        syn::visit::visit_path_segment(self, segment);
    }

    fn visit_block(&mut self, _: &'ast syn::Block) {}
}

const fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Counts the locks in types.
struct Locks(usize);

impl<'ast> Visit<'ast> for Locks {
    fn visit_path_segment(&mut self, segment: &'ast syn::PathSegment) {
        let is_lock = segment.ident == "Mutex" || segment.ident == "RwLock";
        self.0 += usize::from(is_lock);
        syn::visit::visit_path_segment(self, segment);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_as_error_and_second_mutexes_are_found() {
        let two = "struct A { a: Mutex<u8>, b: Arc<RwLock<u8>> }";
        let cases = [
            ("pub fn f() -> Result<(), String> { g() }", 1),
            ("pub trait T { fn f(&self) -> Result<(), String>; }", 1),
            ("pub type F = dyn Fn() -> Result<(), String>;", 1),
            ("pub enum E { A(Result<(), String>) }", 1),
            (
                "impl X { pub fn f(&self) -> Result<(), String> { g() } }",
                1,
            ),
            ("fn f() -> Result<(), String> { g() }", 0),
            (
                "pub fn f() -> Result<String, Error> { g::<Result<(), String>>() }",
                0,
            ),
            (two, 1),
            ("struct A { a: Mutex<u8> }", 0),
        ];
        for (text, found) in cases {
            let file = RustFile::parse("crates/node/src/lib.rs", text).expect("the sample is Rust");
            assert_eq!(check(&file).len(), found, "{text}");
        }
    }
    #[test]
    fn a_third_type_of_a_name_is_found() {
        let types = "struct Row; mod a { enum Row {} } fn f() { trait Row {} } struct Config;";
        for (text, found) in [
            (format!("{types} mod c {{ struct Config; }}"), 1),
            (types.replace("enum Row {}", ""), 0),
            (types.replace("fn f", "#[cfg(test)] fn f"), 0),
        ] {
            let file = RustFile::parse("crates/a/src/lib.rs", &text).expect("the sample is Rust");
            assert_eq!(check_names(&[file]).len(), found, "{text}");
        }
    }
}
