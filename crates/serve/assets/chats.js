// Conversations in this browser: IndexedDB, with limits. Without it they last as long as the page.
"use strict";

// The oldest conversations go first. A browser gives a page some hundred MB at least.
const CHATS_MAX = 200;
const BYTES_MAX = 50e6;

const opened = new Promise((done) => {
  try {
    const request = indexedDB.open("paceline", 1);
    request.onupgradeneeded = () => ["heads", "chats"].forEach((name) => request.result.createObjectStore(name, { keyPath: "id" }));
    request.onsuccess = () => done(request.result);
    request.onerror = () => done(null);
  } catch { done(null); }
});
const memory = new Map(); // where there is no database

// Runs `work` on both stores; its request's result.
async function within(mode, work) {
  const database = await opened;
  return new Promise((done, failed) => {
    const transaction = database.transaction(["heads", "chats"], mode);
    const request = work(transaction.objectStore("heads"), transaction.objectStore("chats"));
    transaction.oncomplete = () => done(request?.result);
    transaction.onabort = () => failed(transaction.error || new Error("the browser keeps no more"));
  });
}

const head = ({ id, title, at }, size) => ({ id, title, at, size });

// Id, title, time and size of all conversations, newest first.
export async function list() {
  const heads = (await opened) ? await within("readonly", (all) => all.getAll()) : [...memory.values()].map((chat) => head(chat, 0));
  return heads.sort((a, b) => b.at - a.at);
}

export async function get(id) {
  return (await opened) ? within("readonly", (_, chats) => chats.get(id)) : memory.get(id);
}

export async function remove(id) {
  memory.delete(id);
  if (await opened) await within("readwrite", (heads, chats) => { heads.delete(id); chats.delete(id); });
}

// Keeps a conversation; returns how many old ones made room for it.
export async function save(chat) {
  const size = JSON.stringify(chat).length;
  if (size > BYTES_MAX) throw new Error("this conversation is too large for the browser to keep: export it");
  if (!(await opened)) { memory.set(chat.id, structuredClone(chat)); return 0; }
  const others = (await list()).filter((it) => it.id !== chat.id);
  let total = size, removed = 0;
  for (const [at, it] of others.entries()) {
    total += it.size;
    if (total > BYTES_MAX || at + 1 >= CHATS_MAX) { await remove(it.id); removed += 1; }
  }
  await within("readwrite", (heads, chats) => { heads.put(head(chat, size)); chats.put(chat); });
  return removed;
}
