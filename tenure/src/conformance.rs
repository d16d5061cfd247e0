//! The contract of [`Store`](crate::store::Store) as an executable test suite: one list of cases
//! that runs on any store.
//!
//! ```
//! use std::sync::Arc;
//! use tenure::{conformance::Fixture, store::MemoryStore};
//!
//! tenure::conformance!(memory, || async { Fixture::new(Arc::new(MemoryStore::new())) });
//! # fn main() {}
//! ```
//!
//! The macro expands to a module with one test per case (`memory::log::a_stale_base_is_refused`).
//! The factory creates a fresh, empty store for each case; `None` instead of a [`Fixture`] skips
//! the case. The calling crate needs `tokio` with the features `macros` and `rt-multi-thread`.

#![expect(clippy::unwrap_used, reason = "a case fails by panicking")]

pub mod blobs;
pub mod check;
pub mod concurrency;
pub mod forks;
pub mod heads;
pub mod log;
pub mod pages;
pub mod purge;
pub mod random;
pub mod reopen;
pub mod search;
pub mod shelves;

mod fixture;
mod kit;

pub use fixture::{Fixture, check};
pub use kit::{
    RandomLog, Rng, StoreState, assert_fails, blob, head_of, item, key, moment, read, read_all, say, session_shelf,
    shelf, state, whole_log,
};

/// Generates the conformance tests of a store: `conformance!(name, factory);` with a factory such
/// as `|| async { Fixture::new(store) }`.
#[macro_export]
macro_rules! conformance {
    ($store:ident, $factory:expr) => {
        $crate::conformance! { @cases $store ($factory)
            log:
                a_created_session_reads_back
                a_glance_shows_what_is_there
                every_kind_of_entry_reads_back
                times_are_kept_to_the_microsecond
                messages_are_kept_byte_for_byte
                large_messages_are_kept
                an_existing_session_is_not_created_again
                a_stale_base_is_refused
                a_store_that_went_back_in_time
                an_unknown_session_takes_nothing
                a_commit_brings_its_items_and_blobs
                a_refused_commit_leaves_nothing
                bad_commits_are_refused
                the_head_can_change_alone
                records_are_read_in_ranges
                long_logs_come_in_pages
                the_tail_of_a_long_log_is_at_hand
                an_unknown_session_has_nothing
                tenants_have_logs_of_their_own;
            heads:
                the_newest_come_first
                a_cursor_leads_through_all_pages
                an_offset_leaves_out_the_first
                no_limit_is_too_small_or_too_large
                tenants_never_mix
                users_see_their_own
                assistants_and_threads_are_found
                states_are_found
                creation_times_are_found
                tags_are_found
                odd_tags_are_found
                metadata_is_found
                titles_are_found_whatever_their_case
                forks_are_found_by_their_parent
                conversations_are_found_by_their_hash
                sessions_are_found_by_their_last_turn
                the_first_due_come_first
                leases_that_ended_are_found
                leases_are_found_by_their_last_word
                what_waits_for_a_person_is_found
                all_conditions_must_hold
                a_changed_head_is_found_by_what_it_is_now
                sessions_are_counted_by_their_state;
            random:
                any_query_agrees_with_its_definition
                any_shelf_agrees_with_its_model
                any_tree_survives_any_purge;
            shelves:
                an_item_reads_back
                odd_items_are_kept
                control_characters_are_kept
                an_item_replaces_its_predecessor
                the_least_recently_used_goes_first
                the_new_item_never_goes
                replacing_an_item_evicts_nothing
                use_is_marked_and_counted
                use_keeps_an_item
                items_come_by_key
                an_item_is_removed_once
                what_is_over_expires
                expiry_has_a_limit
                shelves_are_apart
                a_shelf_needs_its_session
                an_owner_is_cleared_alone;
            search:
                items_are_found_by_a_word
                words_have_no_case
                only_whole_words_count
                the_best_come_first
                only_the_shelf_is_searched
                no_text_is_a_syntax_error
                nothing_is_found_for_nothing
                what_is_gone_is_not_found;
            blobs:
                a_blob_reads_back
                a_blob_may_come_twice
                a_blob_goes_with_its_last_session
                tenants_do_not_share_blobs;
            check:
                a_store_in_order_has_no_findings
                nothing_in_use_is_removed;
            pages:
                pages_together_are_the_list
                a_page_ends_where_its_work_ends
                labels_follow_their_session;
            purge:
                everything_of_a_session_goes
                a_purge_can_be_repeated
                other_sessions_stay
                an_id_can_be_used_again
                a_purge_may_expect_a_state;
            forks:
                a_fork_needs_its_parent
                a_fork_can_not_leave_beyond_the_end
                the_last_fork_inherits
                a_fork_of_a_fork_inherits
                an_heir_can_be_purged_too
                a_fork_from_before_its_parent_began_stays_whole
                a_deleted_fork_inherits_too
                blobs_stay_with_their_records
                any_order_of_purges_keeps_the_rest_whole
                a_writer_may_not_know_of_the_purge
                a_new_session_is_not_taken_for_the_old_parent;
            concurrency:
                sessions_are_written_side_by_side
                no_append_is_lost_or_doubled
                one_creator_wins
                a_reader_sees_whole_commits
                a_fork_and_a_purge_may_meet
                forks_of_one_parent_may_meet_its_purge
                a_shared_blob_stays_while_it_is_used
                a_bounded_shelf_may_be_fought_over
                shelves_do_not_deadlock;
            reopen:
                everything_is_there_again
                heirs_are_there_again
                work_goes_on;
        }
    };
    (@cases $store:ident ($factory:expr) $($topic:ident: $($case:ident)*;)*) => {
        mod $store {
            $(mod $topic {
                #[allow(unused_imports, reason = "a factory may need nothing from around it")]
                use super::super::*;

                $(#[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    $crate::conformance::check(($factory)().await, $crate::conformance::$topic::$case).await;
                })*
            })*
        }
    };
}
