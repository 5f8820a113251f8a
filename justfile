# One-liners; anything with an `if` lives in xtask.

# List the recipes.
default:
    @just --list

# Ask the small model something.
run *ARGS="smollm2":
    cargo run --release -- run {{ARGS}}

# Everything a change must pass.
test:
    cargo xtask test

# What CI runs, here.
ci:
    CI=true .ci/run

# The quick part of `test`: no models, no tests.
check:
    cargo xtask test --only fmt,clippy,tidy

# Tests of one crate.
unit CRATE:
    cargo test --release -p paceline-{{CRATE}}

# Format everything.
fmt:
    cargo fmt --all

# The rules of the house.
tidy:
    cargo xtask tidy

# Function and file lengths.
lengths:
    cargo xtask tidy --report

# Fetch and make the test models.
models:
    cargo xtask models

# Does it still compile for Apple silicon?
darwin:
    cargo xtask darwin

# Licences and sources of dependencies.
deny:
    cargo xtask deny

# The documentation, in the browser.
doc:
    cargo doc --workspace --no-deps --open
