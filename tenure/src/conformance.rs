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
pub mod expiry;
pub mod forks;
pub mod heads;
pub mod ids;
pub mod log;
pub mod messages;
pub mod namespaces;
pub mod pages;
pub mod purge;
pub mod random;
pub mod reopen;
pub mod showing;
pub mod snapshots;

mod fixture;

pub use fixture::{Fixture, check};

/// Generates the conformance tests of a store: `conformance!(name, factory);` with a factory such
/// as `|| async { Fixture::new(store) }`.
#[macro_export]
macro_rules! conformance {
    ($store:ident, $factory:expr) => {
        $crate::conformance! { @cases $store ($factory)
            log:
                a_created_session_reads_back
                a_head_check_returns_the_current_head
                every_kind_of_entry_reads_back
                times_are_stored_to_the_microsecond
                messages_are_stored_byte_for_byte
                large_messages_are_stored
                an_existing_session_is_not_created_again
                a_stale_base_is_refused
                a_store_that_went_back_in_time
                an_append_to_an_unknown_session_is_refused
                a_commit_stores_its_items_and_blobs
                a_refused_commit_stores_nothing
                invalid_commits_are_refused
                the_head_can_change_alone
                records_are_read_in_ranges
                long_logs_come_in_pages
                the_tail_of_a_long_log_is_read_alone
                an_unknown_session_is_empty
                tenants_have_logs_of_their_own;
            heads:
                the_newest_come_first
                a_cursor_leads_through_all_pages
                an_offset_skips_the_first
                no_limit_is_too_small_or_too_large
                tenants_never_mix
                users_see_their_own
                assistants_and_threads_are_found
                statuses_are_found
                creation_times_are_found
                tags_are_found
                unusual_tags_are_found
                metadata_is_found
                titles_are_found_whatever_their_case
                forks_are_found_by_their_parent
                conversations_are_found_by_their_hash
                sessions_are_found_by_their_last_turn
                the_first_due_come_first
                leases_that_ended_are_found
                leases_are_found_by_their_current_end
                sessions_are_found_by_their_reviews
                all_conditions_must_hold
                a_changed_head_is_found_by_its_current_state
                sessions_are_counted_by_their_status;
            expiry:
                expired_sessions_are_found_before_a_sweep;
            ids:
                any_printable_text_is_an_id
                forks_of_unusual_ids_inherit;
            random:
                any_query_agrees_with_its_definition
                any_namespace_agrees_with_its_model
                any_tree_survives_any_purge;
            namespaces:
                an_item_reads_back
                items_are_counted_by_name
                unusual_items_are_stored
                control_characters_are_stored
                an_item_replaces_its_predecessor
                the_least_recently_used_is_evicted_first
                the_new_item_is_never_evicted
                replacing_an_item_evicts_nothing
                use_is_recorded_and_counted
                several_items_are_read_at_once
                use_delays_eviction
                items_are_listed_by_key
                an_item_is_removed_once
                expired_items_are_removed
                expiry_has_a_limit
                namespaces_are_separate
                a_namespace_requires_its_session
                only_namespaces_of_the_owner_are_deleted;
            messages:
                messages_are_found_by_their_words
                messages_of_other_users_are_not_found
                many_messages_are_found
                discarded_messages_are_not_found
                purged_messages_are_not_found
                a_refused_commit_indexes_nothing
                unindexed_sessions_are_indexed_in_steps
                other_rules_empty_the_index
                the_index_survives_a_reopen;
            blobs:
                a_blob_reads_back
                a_blob_may_be_committed_twice
                a_blob_is_deleted_with_its_last_session
                tenants_do_not_share_blobs;
            check:
                a_consistent_store_has_no_findings
                nothing_in_use_is_removed;
            pages:
                pages_together_are_the_list
                a_page_ends_at_its_scan_bound
                labels_follow_their_session;
            purge:
                everything_of_a_session_is_purged
                a_purge_can_be_repeated
                other_sessions_stay
                an_id_can_be_used_again
                a_conditional_purge_checks_its_condition;
            forks:
                a_fork_requires_its_parent
                a_fork_point_is_not_beyond_the_end
                the_fork_with_the_latest_fork_point_inherits
                a_fork_of_a_fork_inherits
                an_inheriting_fork_can_be_purged_too
                a_fork_from_before_its_parent_began_stays_complete
                a_deleted_fork_inherits_too
                blobs_stay_with_their_records
                any_order_of_purges_keeps_the_rest_complete
                a_writer_with_a_stale_head_continues_after_the_purge
                a_new_session_is_not_mistaken_for_the_purged_parent;
            showing:
                a_record_is_shown_by_the_forks_that_inherit_it
                only_existing_sessions_show_records
                a_query_can_name_sessions;
            snapshots:
                a_snapshot_contains_everything
                a_snapshot_shows_one_point_in_time
                a_purge_does_not_change_a_snapshot;
            concurrency:
                sessions_are_written_concurrently
                no_append_is_lost_or_duplicated
                one_creator_wins
                a_reader_sees_complete_commits
                a_fork_and_a_purge_may_be_concurrent
                forks_of_one_parent_may_be_concurrent_with_its_purge
                a_shared_blob_stays_while_it_is_used
                a_bounded_namespace_may_be_contended
                namespaces_do_not_deadlock;
            reopen:
                everything_is_restored
                inheriting_forks_are_restored
                commits_continue_after_a_reopen;
        }
    };
    (@cases $store:ident ($factory:expr) $($topic:ident: $($case:ident)*;)*) => {
        mod $store {
            $(mod $topic {
                #[allow(unused_imports, reason = "a factory may use no imports")]
                use super::super::*;

                $(#[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    $crate::conformance::check(($factory)().await, $crate::conformance::$topic::$case).await;
                })*
            })*
        }
    };
}
