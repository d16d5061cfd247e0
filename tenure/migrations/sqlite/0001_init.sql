-- Times are microseconds since 1970-01-01T00:00:00Z.

-- One row per session. `head_json` is the complete head as JSON, which readers get; the other columns only serve
-- queries. It is the last column, because it is the longest.
create table head (
    id           integer primary key,     -- below 2^31
    tenant       text    not null,
    session      text    not null,
    user         text    not null,
    assistant    text,
    thread       text,
    status       text    not null,
    created_at   integer not null,
    active_at    integer not null,
    due_at       integer,
    seq          integer not null,        -- the last record
    log_hash     integer not null,        -- hash over the records (64 bits, signed); a commit is conditional on it
    visible_hash blob    not null,        -- hash over the visible messages
    match_keys   text    not null,        -- the keys in head_match, hexadecimal, without separators
    parent       text,                    -- the parent session of a fork
    lease_until  integer,
    title        text    not null,        -- folded
    labels       text    not null,        -- a JSON list: tags, plain metadata fields, open reviews
    head_json    text    not null
) strict;

create unique index head_key on head (tenant, session);
create index head_user on head (tenant, user, active_at);
create index head_active on head (tenant, active_at);
create index head_visible_hash on head (tenant, visible_hash, user);
create index head_parent on head (tenant, parent) where parent is not null;
create index head_thread on head (tenant, thread) where thread is not null;
create index head_due on head (due_at) where due_at is not null;
create index head_status on head (status) where status <> 'active'; -- for counts
create index head_lease on head (lease_until) where lease_until is not null;

-- The keys by which content matching finds a session besides its visible hash: its last question and answer, and the
-- tool calls of its last turn.
create table head_match (
    tenant    text    not null,
    match_key blob    not null,
    head_id   integer not null,
    primary key (tenant, match_key, head_id)
) strict, without rowid;

-- The index of labels. Triggers keep it equal to head.labels; an append does not name that column and writes nothing
-- here.
create table head_label (
    tenant  text    not null,
    label   text    not null,
    head_id integer not null,
    primary key (tenant, label, head_id)
) strict, without rowid;

create trigger head_label_insert after insert on head when new.labels <> '[]' begin
    insert into head_label (tenant, label, head_id)
        select new.tenant, value, new.id from json_each(new.labels) where true on conflict do nothing;
end;
create trigger head_label_update after update of labels on head when old.labels <> new.labels begin
    delete from head_label where tenant = old.tenant and head_id = old.id
        and label in (select value from json_each(old.labels));
    insert into head_label (tenant, label, head_id)
        select new.tenant, value, new.id from json_each(new.labels) where true on conflict do nothing;
end;
create trigger head_label_delete after delete on head when old.labels <> '[]' begin
    delete from head_label where tenant = old.tenant and head_id = old.id
        and label in (select value from json_each(old.labels));
end;

-- The logs. record_key = head.id << 32 | seq, so that a log is one range of a rowid table: `without rowid` takes twice
-- the space.
create table record (
    record_key integer primary key,
    at         integer not null,
    checksum   integer not null,          -- CRC-32 over seq, time and entry
    doc        integer,                   -- the number of a message in the message index
    position   integer,                   -- the number of messages before it
    entry      text    not null           -- JSON, exactly as written
) strict;

create index record_doc on record (doc) where doc is not null;

-- Checkpoints and rewinds, for the view workflow_checkpoints. Other records are not in them, so appending a message
-- costs only the two comparisons. The newest come first: see the view.
create index record_checkpoint on record (record_key >> 32, record_key desc) where entry glob '{"checkpoint":*';
create index record_rewound on record (record_key >> 32, record_key desc) where entry glob '{"rewound":*';

-- Items of namespaces.
create table item (
    id              integer primary key,
    tenant          text    not null,
    owner           text    not null,     -- session/ID, user/NAME, group/NAME or tenant
    namespace       text    not null,
    key             text    not null,
    value           text    not null,
    text            text,
    namespace_token text,                 -- one FTS5 token for the namespace, in item_text; null without a text
    created_at      integer not null,
    used_at         integer not null,
    uses            integer not null,
    expires_at      integer
) strict;

create unique index item_key on item (tenant, owner, namespace, key);
create index item_used on item (tenant, owner, namespace, used_at);
create index item_expires on item (expires_at) where expires_at is not null;

-- Full-text index of the items that have a text. With `namespace_token` as an additional word, a search reads only its
-- own namespace.
create view item_with_text (id, namespace_token, text) as
    select id, namespace_token, text from item where text is not null;
create virtual table item_text using fts5(
    namespace_token, text, content = 'item_with_text', content_rowid = 'id', tokenize = 'unicode61 remove_diacritics 2'
);
insert into item_text (item_text, rank) values ('secure-delete', 1);

create trigger item_text_insert after insert on item when new.text is not null begin
    insert into item_text (rowid, namespace_token, text) values (new.id, new.namespace_token, new.text);
end;
create trigger item_text_delete after delete on item when old.text is not null begin
    insert into item_text (item_text, rowid, namespace_token, text)
        values ('delete', old.id, old.namespace_token, old.text);
end;
-- One trigger for both steps: the order of two triggers is not defined.
create trigger item_text_update after update of text on item begin
    insert into item_text (item_text, rowid, namespace_token, text)
        select 'delete', old.id, old.namespace_token, old.text where old.text is not null;
    insert into item_text (rowid, namespace_token, text)
        select new.id, new.namespace_token, new.text where new.text is not null;
end;

-- The message index: the words of messages. Each is stored with a short hash of its tenant before it, and a hash of the
-- user is one more word, so that a search reads only what its own tenant, or its own user, has written. The words are
-- folded already: the tokenizer `ascii` leaves them as they are. A removed message leaves a tombstone; its words are
-- gone when the segments that contain them have been merged.
create virtual table message_words using fts5(
    words, content = '', contentless_delete = 1, detail = none, tokenize = 'ascii'
);

-- The newest messages in the message index, which are moved to message_words in batches: a transaction that writes to
-- an FTS5 table writes a segment, however small.
create table message_recent (
    doc         integer primary key,
    tenant_hash text    not null,
    user_hash   text    not null,
    words       text    not null          -- separated by spaces
) strict;

-- The state of the message index, in one row.
create table message_index (
    id           integer primary key check (id = 1),
    rules        integer,                 -- hash of the rules by which words are computed; null: nothing was indexed
    doc          integer not null,        -- the last number that a message got
    recent       integer not null,        -- the number of rows of message_recent
    compaction   integer not null,        -- 1: message_words contains words of removed messages; 2: a merge is in progress
    from_tenant  text,                    -- the sessions from this key on are not in the index; null: all are
    from_session text,
    after_key    integer not null         -- whether this key itself is in the index
) strict;
insert into message_index (id, doc, recent, compaction, after_key) values (1, 0, 0, 0, 0);

-- Media, once per tenant, and the references of sessions to them.
create table blob (
    tenant text not null,
    id     blob not null,                 -- BLAKE3 of the bytes
    bytes  blob not null
) strict;

create unique index blob_key on blob (tenant, id);

create table blob_ref (
    head_id   integer not null,
    first_seq integer not null,           -- the first record that needs the blob
    tenant    text    not null,
    blob_id   blob    not null
) strict;

create unique index blob_ref_head on blob_ref (head_id, blob_id, first_seq);
create index blob_ref_blob on blob_ref (tenant, blob_id);

-- Internal views of the logs of active and paused sessions.

-- The segments of a session's log: its own records, and those of its ancestors up to the fork point. The ancestors are
-- looked up for each session; json_each makes the list a table.
create view log_segment (tenant, session_id, head_id, last_seq) as
    select h.tenant, h.session, segment.value ->> 0, segment.value ->> 1
    from head h cross join json_each(
        case when h.parent is null then json_array(json_array(h.id, h.seq)) else (
            with recursive segment (head_id, last_seq, parent, fork_point) as (
                select h.id, h.seq, h.parent, h.head_json ->> '$.parent.seq'
                union all
                select ancestor.id, min(segment.last_seq, segment.fork_point),
                    ancestor.parent, ancestor.head_json ->> '$.parent.seq'
                from segment cross join head ancestor
                    on ancestor.tenant = h.tenant and ancestor.session = segment.parent
            )
            select json_group_array(json_array(head_id, last_seq)) from segment
        ) end
    ) segment
    where h.status in ('active', 'paused');

-- The full log of each session.
create view full_log (tenant, session_id, seq, at, entry) as
    select s.tenant, s.session_id, r.record_key & 0xffffffff, r.at, r.entry
    from log_segment s cross join record r
        on r.record_key > s.head_id << 32 and r.record_key <= s.head_id << 32 | s.last_seq;

-- The messages and checkpoints that no later rewind has discarded, with the number of messages before each.
create view visible_record (tenant, session_id, seq, kind, position, record_key) as
    select tenant, session_id, seq, kind,
        count(*) filter (where kind = 'message') over (
            partition by tenant, session_id order by seq rows between unbounded preceding and 1 preceding
        ),
        record_key
    from (
        select tenant, session_id, seq, kind, record_key,
            min(rewound_to) over (
                partition by tenant, session_id order by seq desc rows between unbounded preceding and 1 preceding
            ) as lowest_rewind
        from (
            select s.tenant, s.session_id, r.record_key & 0xffffffff as seq, r.record_key as record_key,
                case
                    when r.entry glob '{"message":*' then 'message'
                    when r.entry glob '{"checkpoint":*' then 'checkpoint'
                    when r.entry glob '{"rewound":*' then 'rewound'
                end as kind,
                case when r.entry glob '{"rewound":*' then r.entry ->> '$.rewound.to' end as rewound_to
            from log_segment s cross join record r
                on r.record_key > s.head_id << 32 and r.record_key <= s.head_id << 32 | s.last_seq
        )
        where kind is not null
    )
    where kind <> 'rewound' and (lowest_rewind is null or lowest_rewind >= seq);

-- Public views: their columns are documented.

create view sessions (session_id, info_json, updated_at, tenant) as
    select session, head_json -> '$.info', head_json ->> '$.info.updated_at', tenant
    from head where status in ('active', 'paused');

create view messages (session_id, ord, message_json, tenant) as
    select v.session_id, v.position, r.entry -> '$.message.body', v.tenant
    from visible_record v cross join record r on r.record_key = v.record_key
    where v.kind = 'message';

create view checkpoints (session_id, label, position, created_at, auto, tenant) as
    select v.session_id, r.entry ->> '$.checkpoint.label', v.position,
        strftime('%Y-%m-%dT%H:%M:%S', r.at / 1000000, 'unixepoch') || printf('.%06dZ', r.at % 1000000),
        coalesce(r.entry ->> '$.checkpoint.auto', 0), v.tenant
    from visible_record v cross join record r on r.record_key = v.record_key
    where v.kind = 'checkpoint';

-- The runs of each session. A fork does not continue its parent's runs: one that had not ended at the fork point was
-- cancelled by the fork. Whether an open run waits is in the head of its session.
create view runs (id, session_id, status, started_at, ended_at, error, code, tenant) as
    select id, session_id,
        case when outcome is not null then outcome when forked_at is not null then 'cancelled' else (
            select case when head_json ->> '$.reviews' is not null
                            or head_json ->> '$.run' = run.id and head_json ->> '$.pause.until' is not null
                        then 'paused'
                        when coalesce(head_json ->> '$.lease.node', '') = '' then 'queued'
                        else 'running' end
            from head h where h.tenant = run.tenant and h.session = run.session_id
        ) end,
        strftime('%Y-%m-%dT%H:%M:%S', started_at / 1000000, 'unixepoch') || printf('.%06dZ', started_at % 1000000),
        strftime('%Y-%m-%dT%H:%M:%S', coalesce(ended_at, forked_at) / 1000000, 'unixepoch')
            || printf('.%06dZ', coalesce(ended_at, forked_at) % 1000000),
        error, code, tenant
    from (
        select tenant, session_id, id, at as started_at, forked_at, entry,
            max(iif(entry glob '{"run_ended":*', at, null)) over run_records as ended_at,
            max(entry ->> '$.run_ended.outcome') over run_records as outcome,
            max(entry ->> '$.run_ended.error') over run_records as error,
            max(entry ->> '$.run_ended.code') over run_records as code
        from (
            select tenant, session_id, at, entry,
                coalesce(entry ->> '$.run_started.run', entry ->> '$.run_ended.run') as id,
                min(iif(entry glob '{"created":*', at, null))
                    over (partition by tenant, session_id order by seq desc) as forked_at
            from full_log
            where entry glob '{"created":*' or entry glob '{"run_started":*' or entry glob '{"run_ended":*'
        )
        window run_records as (partition by tenant, session_id, id)
    ) run
    where entry glob '{"run_started":*';

-- A checkpoint with the session's state at it. A visible checkpoint was never discarded, nor was any message before it:
-- the messages before it now are those before it when it was created. The metadata are folded as the library does:
-- `created` begins them, `info` patches them, and the decisions of reviews are only those in the log.
--
-- The checkpoints of a session come from an index, the newest first, and the state is a subquery: for the newest ones
-- (`order by updated_at desc limit 1`), SQLite computes no other states.
create view workflow_checkpoints (id, session_id, run_id, state, step_index, created_at, updated_at, tenant) as
    select s.tenant || '/' || s.session_id || '/' || (c.record_key & 0xffffffff), s.session_id,
        c.entry ->> '$.checkpoint.run',
        (
            with message (ord, body) as materialized (
                select row_number() over (order by seq) - 1, entry -> '$.message.body'
                from (
                    select l.seq, l.entry,
                        min(case when l.entry glob '{"rewound":*' then l.entry ->> '$.rewound.to' end)
                            over (order by l.seq desc) as lowest_rewind
                    from full_log l
                    where l.tenant = s.tenant and l.session_id = s.session_id
                        and l.seq < c.record_key & 0xffffffff
                        and (l.entry glob '{"message":*' or l.entry glob '{"rewound":*')
                )
                where entry glob '{"message":*' and (lowest_rewind is null or lowest_rewind >= seq)
            ),
            result (call_id, last_ord) as materialized (
                select body ->> '$.tool_call_id', max(ord) from message where body ->> '$.role' = 'tool' group by 1
            ),
            change (n, at, entry) as materialized (
                select row_number() over (order by l.seq), l.at, l.entry
                from full_log l
                where l.tenant = s.tenant and l.session_id = s.session_id
                    and l.seq <= c.record_key & 0xffffffff
                    and (l.entry glob '{"created":*' or l.entry glob '{"info":*' or l.entry glob '{"review_decided":*')
            ),
            folded (n, metadata, decisions) as (
                select 0, '{}', null
                union all
                select change.n,
                    case when change.entry glob '{"created":*'
                         then coalesce(change.entry -> '$.created.metadata', '{}')
                         when change.entry glob '{"info":*'
                         then json_patch(folded.metadata, coalesce(change.entry -> '$.info.metadata', '{}'))
                         else folded.metadata end,
                    case when change.entry glob '{"created":*'
                         then iif(change.entry -> '$.created.parent' is null, null,
                             change.entry -> '$.created.metadata.hitl_decisions')
                         when change.entry glob '{"info":*' then folded.decisions
                         else json_insert(
                             iif(json_type(folded.decisions) = 'array', folded.decisions, '[]'), '$[#]',
                             json_patch('{}', json_object(
                                 'step', change.entry -> '$.review_decided.step',
                                 'decision', change.entry -> '$.review_decided.decision',
                                 'reviewer', change.entry -> '$.review_decided.reviewer',
                                 'timestamp', strftime('%Y-%m-%dT%H:%M:%S', change.at / 1000000, 'unixepoch')
                                     || rtrim(rtrim(printf('.%06d', change.at % 1000000), '0'), '.') || 'Z',
                                 'notes', change.entry -> '$.review_decided.notes'))) end
                from folded cross join change on change.n = folded.n + 1
            )
            select json_object(
                'label', c.entry -> '$.checkpoint.label',
                'position', m.position,
                'messages', json(m.messages),
                'pending_tool_calls', json((
                    select json_group_array(json(call)) from (
                        select call.value as call
                        from message m cross join json_each(m.body, '$.tool_calls') call
                        left join result r on r.call_id = call.value ->> '$.id'
                        where m.body ->> '$.role' = 'assistant' and json_type(m.body, '$.tool_calls') = 'array'
                            and (r.last_ord is null or r.last_ord < m.ord)
                        order by m.ord, call.key
                    )
                )),
                'tool_results', json(m.tool_results),
                'metadata', json((
                    select iif(decisions is null, json_remove(metadata, '$.hitl_decisions'),
                        json_set(metadata, '$.hitl_decisions', json(decisions)))
                    from folded order by n desc limit 1
                )),
                'state', json(coalesce(c.entry -> '$.checkpoint.state', '{}')))
            from (
                select count(*) as position, json_group_array(json(body)) as messages,
                    json_group_array(
                        json_object('tool_call_id', body -> '$.tool_call_id', 'content', body -> '$.content')
                    ) filter (where body ->> '$.role' = 'tool') as tool_results
                from (select body from message order by ord)
            ) m
        ),
        c.entry ->> '$.checkpoint.step',
        strftime('%Y-%m-%dT%H:%M:%S', c.at / 1000000, 'unixepoch') || printf('.%06dZ', c.at % 1000000),
        strftime('%Y-%m-%dT%H:%M:%S', c.at / 1000000, 'unixepoch') || printf('.%06dZ', c.at % 1000000),
        s.tenant
    from log_segment s cross join record c indexed by record_checkpoint
        on c.record_key >> 32 = s.head_id and c.record_key <= s.head_id << 32 | s.last_seq
    where c.entry glob '{"checkpoint":*'
        and not exists (
            select 1 from log_segment t cross join record w indexed by record_rewound
                on w.record_key >> 32 = t.head_id and w.record_key <= t.head_id << 32 | t.last_seq
            where t.tenant = s.tenant and t.session_id = s.session_id and w.entry glob '{"rewound":*'
                and w.record_key & 0xffffffff > c.record_key & 0xffffffff
                and w.entry ->> '$.rewound.to' < c.record_key & 0xffffffff
        );
