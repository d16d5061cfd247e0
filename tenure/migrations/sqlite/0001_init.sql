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
    entry      text    not null           -- JSON, exactly as written
) strict;

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

-- The segments of a session's log: its own records, and those of its ancestors up to the fork point.
create view log_segment (tenant, session_id, head_id, last_seq) as
    select tenant, session, id, seq from head where parent is null and status in ('active', 'paused')
    union all
    select * from (
        with recursive segment (tenant, session_id, head_id, last_seq, parent, fork_point) as (
            select tenant, session, id, seq, parent, head_json ->> '$.parent.seq'
            from head where parent is not null and status in ('active', 'paused')
            union all
            select segment.tenant, segment.session_id, ancestor.id, min(segment.last_seq, segment.fork_point),
                ancestor.parent, ancestor.head_json ->> '$.parent.seq'
            from segment cross join head ancestor
                on ancestor.tenant = segment.tenant and ancestor.session = segment.parent
        )
        select tenant, session_id, head_id, last_seq from segment
    );

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
