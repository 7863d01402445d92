// The search reads a leading dash as "without this word". Here it begins a flag: --max-staleness.
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  if (typeof message?.data === "string") {
    message = { ...message, data: message.data.replace(/(^|\s)-+(?=\w)/g, "$1") };
  }
  return post.call(this, message, ...rest);
};
