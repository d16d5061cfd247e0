-- Format 4. The sessions that have a label (a tag, a metadata field, an open review …), so that a filter reads the sessions
-- that match and not all of them. Triggers keep it equal to head.labels: an append does not name that column and writes
-- nothing here.
create table head_label (
    tenant  text    not null,
    label   text    not null,
    head_id integer not null,
    primary key (tenant, label, head_id)
) strict, without rowid;

insert into head_label (tenant, label, head_id) select head.tenant, value, head.id from head, json_each(head.labels) where true
    on conflict do nothing;

create trigger head_label_insert after insert on head when new.labels <> '[]' begin
    insert into head_label (tenant, label, head_id) select new.tenant, value, new.id from json_each(new.labels) where true
        on conflict do nothing;
end;
create trigger head_label_update after update of labels on head when old.labels <> new.labels begin
    delete from head_label where tenant = old.tenant and head_id = old.id
        and label in (select value from json_each(old.labels));
    insert into head_label (tenant, label, head_id) select new.tenant, value, new.id from json_each(new.labels) where true
        on conflict do nothing;
end;
create trigger head_label_delete after delete on head when old.labels <> '[]' begin
    delete from head_label where tenant = old.tenant and head_id = old.id
        and label in (select value from json_each(old.labels));
end;
