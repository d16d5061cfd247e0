//! One principal must not slow down or starve another.
